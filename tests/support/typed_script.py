"""Script of a user of `import podscale`, which `make types` checks as a user's own mypy would; it is not run."""

from pathlib import Path
from typing import Any, assert_type

import podscale

config = podscale.load("digits", train={"epochs": 5})
assert_type(config, podscale.RunConfig)
shards = podscale.shard(config)
assert_type(shards.images, dict[str, int])
run = podscale.train(config, shard_set=shards, progress=lambda record: print(record["kind"]))
assert_type(run, podscale.Run)
assert_type(run.metrics("step"), list[dict[str, Any]])
evaluation = podscale.evaluate(run)
assert_type(evaluation, podscale.Evaluation)
assert_type(evaluation.scores.top1, float)
for prediction in podscale.predict(run, [Path("photos"), "more.tar"], top=2):
    assert_type(prediction, podscale.Prediction)
submitted = podscale.submit(config, stage="train")
assert_type(submitted.wait().status(), list[podscale.JobStatus])
try:
    podscale.run(fresh=True)
except podscale.Preempted as error:
    assert_type(error.hint, str)
