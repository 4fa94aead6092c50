"""The library accepts the small shard set of the fixtures."""

import io
import tarfile

from PIL import Image

from podscale.data.shard_set import ShardSet


def test_make_shard_set(make_shard_set):
    shard_set = ShardSet.open(make_shard_set())
    train = shard_set.split("train")
    assert (len(train), len(shard_set.split("validation"))) == (48, 20)
    with tarfile.open(train.directory / train.shard_names[1]) as tar:
        names = tar.getnames()
    assert names[:2] == ["00000024.jpg", "00000024.cls"]
    for i in range(len(train)):
        image = Image.open(io.BytesIO(train.read(i).tobytes()))
        assert image.size == (train.column("width")[i], train.column("height")[i])
    assert train.source(30) == b"image-30"
