"""Pipelines of other projects from a shard set to batches of crops, as their training scripts have them."""

import io
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.input.pipelines import Pipeline, batches, draw_crops
from podscale.bench.input_rates import BatchSizes
from podscale.data.decode import decode
from podscale.data.shard_set import Split

Transform = Callable[[Any], Any]
"""From a PIL image to the crop, a PIL image or an array."""


def pil_transforms(interpolation: str = "bilinear") -> Pipeline:
    """PIL decodes, torchvision crops and flips PIL images, as in the usual training script."""
    return pil_pipeline(lambda size: torchvision_transforms(size, interpolation))


def timm_transforms(interpolation: str = "bilinear") -> Pipeline:
    """PIL decodes, timm crops and flips, as for its loader that normalises on the GPU."""
    return pil_pipeline(lambda size: timm_transform(size, interpolation))


def pil_pipeline(build: Callable[[int], Transform]) -> Pipeline:
    """Return the pipeline in which PIL decodes and a transform for a side does the rest."""

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        from PIL import Image

        transform = build(size)
        images = np.empty((batch, size, size, 3), dtype=np.uint8)
        for rows in batches(split, batch):
            for slot, row in enumerate(rows):
                images[slot] = pixels(transform(Image.open(io.BytesIO(split.read(row).tobytes())).convert("RGB")))
            yield batch

    return run


def pixels(image: Any) -> Any:
    """Return a PIL image, or an array or tensor of 3 planes, as [height, width, 3]."""
    array = np.asarray(image)
    return array.transpose(1, 2, 0) if array.shape[0] == 3 else array


def tensor_transforms(interpolation: str = "bilinear") -> Pipeline:
    """torchvision decodes, crops and flips tensors."""

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        torch.set_num_threads(1)
        augment = torchvision_transforms(size, interpolation)
        images = torch.empty((batch, size, size, 3), dtype=torch.uint8)
        for rows in batches(split, batch):
            for slot, row in enumerate(rows):
                image = decode_jpeg(torch.from_numpy(split.read(row).copy()), mode=ImageReadMode.RGB)
                images[slot] = augment(image).permute(1, 2, 0)
            yield batch

    return run


def torchvision_transforms(size: int, interpolation: str) -> Transform:
    from torchvision.transforms import InterpolationMode, v2

    mode = InterpolationMode(interpolation)
    return v2.Compose([v2.RandomResizedCrop(size, interpolation=mode, antialias=True), v2.RandomHorizontalFlip()])


def timm_transform(size: int, interpolation: str, auto_augment: str | None = None) -> Transform:
    from timm.data import create_transform

    options: dict[str, Any] = {"color_jitter": None, "auto_augment": auto_augment, "interpolation": interpolation}
    # Pixels stay uint8, because its loader normalises on the GPU.
    transform: Transform = create_transform(size, is_training=True, use_prefetcher=True, **options)
    return transform


def webdataset(interpolation: str = "bilinear") -> Pipeline:
    return partial(_webdataset, interpolation)


def _webdataset(interpolation: str, split: Split, batch: int, size: int) -> BatchSizes:
    import webdataset as wds

    crop, images = torchvision_transforms(size, interpolation), np.empty((batch, size, size, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "train.tar"
        with tarfile.open(path, "w") as archive:
            for row in range(len(split)):
                record = split.read(row).tobytes()
                member = tarfile.TarInfo(f"{row:08}.jpg")
                member.size = len(record)
                archive.addfile(member, io.BytesIO(record))
        dataset = wds.WebDataset(str(path), shardshuffle=False, empty_check=False).repeat()
        samples = iter(dataset.decode("pilrgb").to_tuple("jpg").map_tuple(crop))
        while True:
            for slot in range(batch):
                images[slot] = np.asarray(next(samples)[0])
            yield batch


def tf_data(interpolation: str = "bilinear") -> Pipeline:
    """tf.data decodes the crop only, as TensorFlow's ResNet for TPUs, and resizes without antialiasing."""
    return partial(_tf_data, interpolation)


def _tf_data(interpolation: str, split: Split, batch: int, size: int) -> BatchSizes:
    import tensorflow as tf

    records = [split.read(row).tobytes() for row in range(len(split))]

    def crop(record: Any) -> Any:
        shape = tf.image.extract_jpeg_shape(record)
        whole = tf.constant([0.0, 0.0, 1.0, 1.0], shape=[1, 1, 4])
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            shape,
            whole,
            min_object_covered=0.1,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([begin[:2], extent[:2]], axis=0)
        image = tf.image.decode_and_crop_jpeg(record, window, channels=3)
        resized = tf.image.resize(image, [size, size], method=interpolation)
        return tf.cast(tf.image.random_flip_left_right(resized), tf.uint8)

    dataset = tf.data.Dataset.from_tensor_slices(records).repeat().map(crop).batch(batch)
    options = tf.data.Options()
    options.threading.private_threadpool_size, options.threading.max_intra_op_parallelism = 1, 1
    for images in dataset.with_options(options):
        yield len(images)


def opencv(split: Split, batch: int, size: int) -> BatchSizes:
    """simplejpeg decodes, OpenCV resizes linearly without antialiasing (pixels differ from PIL's)."""
    import cv2

    cv2.setNumThreads(1)
    images = np.empty((batch, size, size, 3), dtype=np.uint8)
    for rows in batches(split, batch):
        _, _, views = draw_crops(split, rows, size)
        for slot, row in enumerate(rows.tolist()):
            view = views[slot]
            part = decode(split.read(row))[view.top : view.top + view.height, view.left : view.left + view.width]
            square = cv2.resize(part, (size, size), interpolation=cv2.INTER_LINEAR)
            images[slot] = square[:, ::-1] if view.flip else square
        yield batch


def decode_only(split: Split, batch: int, size: int) -> BatchSizes:
    """Full decode of the reference loader, without crop and resize: the limit of loaders that decode whole images."""
    for rows in batches(split, batch):
        for row in rows.tolist():
            decode(split.read(row))
        yield batch
