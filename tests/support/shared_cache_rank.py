"""Process of a node whose decoded cache is shared; the variable PODSCALE_DECODED_CACHE names its memory.

python -m tests.support.shared_cache_rank read SHARD_SET RANK STEPS DOCUMENT    print what a rank read, as JSON
python -m tests.support.shared_cache_rank fill SHARD_SET SEED                   keep and check blocks of every row
python -m tests.support.shared_cache_rank write SHARD_SET BYTES                 keep large blocks until it is killed
"""

import hashlib
import json
import os
import sys
from typing import Any

import numpy as np

from podscale.config.run_config import RunConfig
from podscale.data.loaders import cpu
from podscale.data.loaders.decoded_cache import SharedImages
from podscale.data.native import CropDecoder
from podscale.data.shard_set import ShardSet, Split
from podscale.util import env
from tests.support.loading import open_loader

RANKS = 2


def batch_digest(batch: Any) -> str:
    return hashlib.sha256(batch.keys.tobytes() + np.ascontiguousarray(batch.images).tobytes()).hexdigest()


def read(split: Split, rank: int, steps: int, document: str) -> None:
    decoded = packed = 0
    decode_rows, pack = cpu.decode_rows, CropDecoder.pack

    def count_decoded(*arguments: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return decode_rows(*arguments)

    def count_packed(decoder: CropDecoder, records: Any, limits: Any) -> Any:
        nonlocal packed
        packed += len(records)
        return pack(decoder, records, limits)

    cpu.decode_rows, CropDecoder.pack = count_decoded, count_packed
    config = RunConfig.model_validate_json(document)
    with open_loader(config, split, ranks=range(rank, rank + 1), world=RANKS) as loader:
        digests = [batch_digest(batch) for batch in loader.batches(0, steps)]
        size = loader.cached_bytes["decoded"]
    print(json.dumps({"digests": digests, "decoded": decoded, "packed": packed, "cached_bytes": size}))


def block_of(row: int) -> bytes:
    return bytes([row % 251]) * (5000 + row)


def fill(images: SharedImages, rows: int, seed: int) -> None:
    for row in np.random.default_rng(seed).integers(0, rows, 20 * rows).tolist():
        assert images._table.keep(row, 0, block_of(row))
        found = images._table.find(row)
        if found is not None:  # else the other process is writing it
            begin, length, _ = found
            assert images._memory[begin : begin + length].tobytes() == block_of(row)


def main(task: str, directory: str, *arguments: str) -> None:
    split = ShardSet.open(directory).split("train")
    if task == "read":
        read(split, int(arguments[0]), int(arguments[1]), arguments[2])
        return
    images = SharedImages(os.environ[env.DECODED_CACHE], split, 1)
    if task == "fill":
        fill(images, len(split), int(arguments[0]))
    else:
        block = bytes(int(arguments[0]))
        for row in range(len(split)):
            assert images._table.keep(row, 0, block)


if __name__ == "__main__":
    main(*sys.argv[1:])
