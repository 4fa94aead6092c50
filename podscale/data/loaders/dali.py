"""NVIDIA DALI loader: decodes only the crop, on the CPU or with the GPU's JPEG engine, from the mapped shards.

DALI gets the crops from the batch plan and draws no random numbers. Decoded pixels equal PIL's on the CPU; resizing
differs by about one gray level (DALI filters in float, PIL in fixed point), by more in the few pixels at the border
(DALI repeats the image's outer pixels, PIL drops the weights outside).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

from podscale.config.data import Interpolation
from podscale.data.batch_plan import BatchPlan, BatchRequest
from podscale.data.loaders.base import BadRecordGuard, Batch

INTERPOLATION_TYPES: dict[Interpolation, Any] = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
"""DALI's filters; its cubic has PIL's a = -0.5, and both widen with the scale if antialiased."""


@dataclass(frozen=True)
class DaliBatch:
    """Input of the pipeline for one batch; keeps its records until their images are decoded."""

    request: BatchRequest
    records: Sequence[npt.NDArray[np.uint8]]
    columns: dict[str, npt.NDArray[Any]]

    def __getitem__(self, slot: int) -> DaliBatch:
        one = slice(slot, slot + 1)
        return DaliBatch(self.request, self.records[one], {name: column[one] for name, column in self.columns.items()})


class DaliLoader:
    """Loader with `prefetch` batches in the pipeline and `workers` CPU threads."""

    def __init__(
        self, batch_plan: BatchPlan, guard: BadRecordGuard, *, workers: int, prefetch: int, seed: int, device: str
    ) -> None:
        self._batch_plan, self._guard = batch_plan, guard
        self._workers, self._prefetch, self._seed, self._device = workers, prefetch, seed, device
        self._pipeline: Any = None
        self._stream: Any = None

    @property
    def bad_records(self) -> int:
        return self._guard.bad_records

    @property
    def queued_batches(self) -> None:
        """None, because DALI (2.4) does not report which batches are done."""
        return

    @property
    def native_refusals(self) -> Mapping[str, int]:
        return {}

    @property
    def cached_bytes(self) -> Mapping[str, int]:
        return {"records": self._batch_plan.split.cached_bytes}

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        while start < stop:
            try:
                for batch in self._run(start, self._batch_plan.end_of_shape(start, stop)):
                    start = batch.step + 1
                    yield batch
            except _BrokenPipeline:
                continue  # the bad records are known now: rebuild the pipeline at the same step
        self.close()

    def close(self) -> None:
        self._pipeline = None

    def _run(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield batches of one shape, up to `stop` or to one that breaks the pipeline."""
        steps = iter(range(start, stop))
        window = deque(self._prepare_batch(step) for _, step in zip(range(self._prefetch + 1), steps, strict=False))
        filled = [feed for feed in window if feed.records]
        if filled:  # a batch of padding only is not fed to the pipeline
            side = self._batch_plan.image_size_at(start)
            self._pipeline = self._build(max(len(feed.records) for feed in filled), side, depth=len(filled))
            for feed in filled:
                _feed_pipeline(self._pipeline, feed)
            self._pipeline.schedule_run()  # the first call runs `depth` batches
        while window:
            feed = window.popleft()
            images = self._images(feed, [feed, *window])
            for step in steps:
                window.append(self._prepare_batch(step))
                if window[-1].records:
                    _feed_pipeline(self._pipeline, window[-1])
                    self._pipeline.schedule_run()
                break
            yield self._batch_plan.make_batch(feed.request, images)

    def _prepare_batch(self, step: int) -> DaliBatch:
        request = self._batch_plan.request_at(step)
        rows, epochs = request.rows[: request.sample_count], request.epochs[: request.sample_count]
        crops = self._batch_plan.crops_of(step, rows, epochs)
        columns = {
            "anchor": _pairs(crops.top, crops.left, np.int32),
            "shape": _pairs(crops.height, crops.width, np.int32),
            "size": _pairs(crops.out_height, crops.out_width, np.float32),
            "corner": _pairs(crops.out_top, crops.out_left, np.int32),
            "flip": crops.flip.astype(np.int32),
        }
        return DaliBatch(request, [self._batch_plan.split.read_to_keep(row) for row in rows.tolist()], columns)

    def _images(self, feed: DaliBatch, in_flight: Sequence[DaliBatch]) -> Any:
        """Return the images of the oldest batch in the pipeline, with zeros for the padding."""
        size = self._batch_plan.image_size_at(feed.request.step)
        shape = (len(feed.request.rows), size, size, 3)
        if not feed.records:
            return self._zeros(shape)
        try:
            (output,) = self._pipeline.share_outputs()
        except RuntimeError as error:
            self._mark_bad_records(in_flight, error)
            raise _BrokenPipeline from error
        images = self._copy_output(shape, output.as_tensor(), len(feed.records))
        self._pipeline.release_outputs()
        return images

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        if self._device == "cpu":
            return np.zeros(shape, dtype=np.uint8)
        import torch

        return torch.zeros(shape, dtype=torch.uint8, device=self._device)

    def _copy_output(self, shape: tuple[int, ...], output: Any, count: int) -> Any:
        """Copy DALI's output, with zeros for the padding.

        On a GPU it uses and waits for a separate stream: the current stream has training steps queued, and on DALI's
        stream the copy would write to memory that torch has not zeroed yet.
        """
        if self._device == "cpu":
            images = self._zeros(shape)
            images[:count] = np.asarray(output)
            return images
        import torch
        from nvidia.dali.plugin.pytorch import feed_ndarray

        self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            images = self._zeros(shape)
            feed_ndarray(output, images[:count], cuda_stream=self._stream)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        copied.synchronize()
        return images

    def _mark_bad_records(self, in_flight: Sequence[DaliBatch], error: RuntimeError) -> None:
        """Find the records that DALI cannot decode by running them one by one; raise `error` if there are none."""
        self._pipeline = None
        probe, recorded = None, False
        for feed in in_flight:
            for slot in range(len(feed.records)):
                probe = probe or self._build(1, self._batch_plan.image_size_at(feed.request.step), depth=1)
                try:
                    _feed_pipeline(probe, feed[slot])
                    probe.schedule_run()
                    probe.share_outputs()
                    probe.release_outputs()
                except RuntimeError as reason:
                    probe, recorded = None, True
                    row, epoch = int(feed.request.rows[slot]), int(feed.request.epochs[slot])
                    self._guard.mark_bad(row, epoch, _error_summary(reason))
            if recorded:
                return
        raise error

    def _build(self, batch: int, side: int, *, depth: int) -> Pipeline:
        on_gpu = self._device != "cpu"
        gpu_options: Any = {"jpeg_fancy_upsampling": True} if on_gpu else {}  # as libjpeg does on the CPU
        pipeline = Pipeline(
            batch_size=batch,
            num_threads=self._workers,
            device_id=_device_number(self._device),
            seed=self._seed % 2**31,
            prefetch_queue_depth=depth,
        )
        with pipeline:
            records = fn.external_source(name="records", ndim=1, dtype=types.UINT8, no_copy=True)
            anchor, shape, corner = (
                fn.external_source(name=name, ndim=1, dtype=types.INT32) for name in ("anchor", "shape", "corner")
            )
            size = fn.external_source(name="size", ndim=1, dtype=types.FLOAT)
            flip = fn.external_source(name="flip", ndim=0, dtype=types.INT32)
            images = fn.decoders.image_slice(
                records,
                anchor,
                shape,
                axes=[0, 1],
                normalized_anchor=False,
                normalized_shape=False,
                device="mixed" if on_gpu else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,  # PIL ignores EXIF's orientation too
                **gpu_options,
            )
            filter_type = INTERPOLATION_TYPES[self._batch_plan.interpolation]
            images = fn.resize(images, size=size, interp_type=filter_type, antialias=True)
            images = fn.slice(
                images,
                corner,
                [side, side],
                axes=[0, 1],
                normalized_anchor=False,
                normalized_shape=False,
                out_of_bounds_policy="pad",  # with black
            )
            pipeline.set_outputs(fn.flip(images, horizontal=flip))
        pipeline.build()
        return pipeline


class _BrokenPipeline(Exception):
    """DALI could not decode a record, after which the pipeline is unusable."""


def _feed_pipeline(pipeline: Pipeline, feed: DaliBatch) -> None:
    pipeline.feed_input("records", feed.records)
    for name, column in feed.columns.items():
        pipeline.feed_input(name, column)


def _pairs(first: npt.NDArray[Any], second: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.stack([first, second], axis=1).astype(dtype)


def _device_number(device: str) -> int | None:
    if device == "cpu":
        return None
    return int(device.partition(":")[2] or 0)


def _error_summary(error: RuntimeError) -> str:
    """Return DALI's error without the traceback to the definition of the pipeline."""
    _, _, reason = str(error).rpartition("encountered:")
    return reason.replace("Current pipeline object is no longer valid.", "").strip()[:200]
