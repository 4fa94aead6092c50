"""Rank entry of the JAX engine, in which rank PODSCALE_TEST_ODD deviates as PODSCALE_TEST_DO says."""

import os
import sys
import time
from pathlib import Path

from podscale.config import RunConfig
from podscale.jax import worker


def main() -> None:
    if os.environ["RANK"] == os.environ["PODSCALE_TEST_ODD"]:
        match os.environ["PODSCALE_TEST_DO"]:
            case "another document":
                config = RunConfig.model_validate_json(os.environ["PODSCALE_CONFIG"])
                train = config.train.model_copy(update={"label_smoothing": 0.25})
                os.environ["PODSCALE_CONFIG"] = config.model_copy(update={"train": train}).model_dump_json()
            case "another library":
                odd = Path(os.environ["PODSCALE_RANK_DIR"]) / "odd"
                (odd / "jaxlib-0.4.2.dist-info").mkdir(parents=True)
                (odd / "jaxlib-0.4.2.dist-info" / "METADATA").write_text("Name: jaxlib\nVersion: 0.4.2\n")
                sys.path.insert(0, str(odd))  # use the installed package
            case "no shard set":
                os.environ["PODSCALE_SHARD_SET"] = "/nowhere"
            case "never comes":
                time.sleep(600)
                sys.exit("the test should have ended earlier")
    worker.main()


if __name__ == "__main__":
    main()
