"""Errors and stack dumps for a failed collective, a hang or a failed GPU, which name the collective, rank and GPU.

When a rank exits, the collectives of its peers fail or hang. Each peer's `PeerWatch` then reads the heartbeats, raises
HangDetected or PeerLost with the culprit's name, and the peer exits. `launch.supervisor` decides on a restart.
"""

import faulthandler
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from podscale.distributed.gpu_failure import gpu_failed, gpu_failure_of
from podscale.distributed.heartbeat import RankHeartbeat
from podscale.distributed.progress_tracker import HangLimit, ProgressTracker, progress_order
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.waits import current_wait, wait_of
from podscale.errors import HangDetected, PeerLost, PodscaleError, Preempted

logger = logging.getLogger(__name__)

COLLECTIVE_GRACE_SECONDS = 5.0
"""Extra time before the heartbeat reports a hang, seconds: the error of the collective itself is more precise."""

FlightRecorder = Callable[[Path], str]
"""Function that writes the state of an engine's collectives to a file and returns one line for the stack dump."""


@dataclass(frozen=True)
class CollectiveFailures:
    """Classification of the failures of an engine's collectives.

    Args:
        classify_error: Returns HangDetected or PeerLost for an error caused by another rank, else None.
        silent: Collectives wait on the device and raise no error (NCCL's).
    """

    classify_error: Callable[[BaseException], type[PodscaleError] | None]
    silent: bool
    flight_recorder: FlightRecorder | None = None


def dump_stacks(
    directory: Path,
    rank: int,
    reason: str,
    failure: BaseException | None = None,
    flight_recorder: FlightRecorder | None = None,
) -> None:
    """Append `failure` and the stacks of all threads to rank-<k>.txt; an unwritable directory is logged, not raised.

    The flight recorder writes to rank-<k>.flight.json.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"rank-{rank}.txt").open("a", encoding="utf-8") as file:
            now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            file.write(f"{now} UTC, rank {rank}, process {os.getpid()} on {socket.gethostname()}: {reason}\n")
            file.writelines(traceback.format_exception(failure) if failure is not None else [])
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            if flight_recorder is not None:
                file.write(flight_recorder(directory / f"rank-{rank}.flight.json"))
            file.write("\n\n")
    except OSError as error:
        logger.warning("%s: cannot write the stacks of this rank (%s)", directory, error.strerror)


class PeerWatch:
    """Context manager that sends heartbeats, and raises errors with the name of the rank or the GPU that caused them.

    Args:
        exit_process: Reports an error and exits this process; called on another thread when the main thread hangs.
        hang_seconds: Shortest time without a step that counts as a hang; None: hangs are not detected.
        stack_directory: Directory for the stacks of every rank after a hang.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        exit_process: Callable[[PodscaleError], None],
        failures: CollectiveFailures,
        *,
        interval_seconds: float | None = None,
        hang_seconds: float | None = None,
        stack_directory: Path | None = None,
    ) -> None:
        self._rank_group, self._exit_process, self._failures = rank_group, exit_process, failures
        self._interval_seconds, self._stack_directory = interval_seconds, stack_directory
        max_seconds = rank_group.timeout_seconds + (0.0 if failures.silent else COLLECTIVE_GRACE_SECONDS)
        self._progress_tracker = ProgressTracker(None if hang_seconds is None else HangLimit(hang_seconds, max_seconds))
        self._report_lock = threading.Lock()

    def __enter__(self) -> ProgressTracker:
        self._heartbeat = RankHeartbeat(
            self._rank_group,
            self._progress_tracker,
            interval_seconds=self._interval_seconds,
            stall_seconds=self._rank_group.timeout_seconds if self._failures.silent else None,
            on_failure=self._exit_on_failure,
        )
        return self._progress_tracker

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Preempted):
            self._heartbeat.stop("")
            return
        with self._report_lock:
            pass  # another thread reports a more precise error and exits this process
        gpu_error = self._gpu_error(error)
        peer_error = None if gpu_error is not None else self._peer_error(error)
        named = gpu_error or peer_error
        # An error of these types was already reported in full by the code that raised it.
        caused_by_peer = peer_error is not None or isinstance(error, HangDetected | PeerLost)
        reason = str(gpu_error or error) or type(error).__name__
        self._heartbeat.stop(reason, caused_by_peer=caused_by_peer)
        if named is not None:
            raise named from error

    def _exit_on_failure(self, reason: str, *, hang: bool) -> None:
        """Report a failure that the heartbeat detected, and exit this process, because the main thread hangs."""
        with self._report_lock:
            if hang:
                self._report_hang(reason)
            collective = current_wait() or f"phase {self._progress_tracker.phase}"
            error = self._name_culprit(HangDetected if hang else PeerLost, collective, reason)
            self._heartbeat.stop(str(error), caused_by_peer=True)
            self._exit_process(error)

    def _gpu_error(self, error: BaseException) -> PodscaleError | None:
        """Return the error with the GPU's name if `error` reports that it failed, else None."""
        failure = gpu_failure_of(error)
        if failure is None:
            return None
        logger.error("the GPU failed here, or in a kernel that was started before", exc_info=error)
        return gpu_failed(failure, self._this_rank, self._progress_tracker.device, str(self._progress_tracker))

    @property
    def _this_rank(self) -> str:
        return f"rank {self._rank_group.rank} of {self._rank_group.size}"

    def _peer_error(self, error: BaseException) -> PodscaleError | None:
        """Return the error with the culprit's name if another rank caused `error`, else None."""
        kind = self._failures.classify_error(error)
        if kind is None:
            return None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if kind is HangDetected or self._heartbeat.hang_reported():
            kind = HangDetected
            self._report_hang(reason, error)
        return self._name_culprit(kind, wait_of(error) or "a collective", reason)

    def _report_hang(self, reason: str, failure: BaseException | None = None) -> None:
        """Report a hang to all ranks, and dump the stacks of this rank."""
        self._heartbeat.report_hang()
        if self._stack_directory is not None:
            reason = f"{reason}, in {self._progress_tracker}"
            recorder = self._failures.flight_recorder
            dump_stacks(self._stack_directory, self._rank_group.rank, reason, failure, recorder)

    def _name_culprit(self, kind: type[PodscaleError], collective: str, reason: str) -> PodscaleError:
        """Return the error that names the culprit.

        Args:
            kind: Type from the backend, which cannot distinguish a stopped peer from one that exited because of another
                rank; the status of the peers overrides it when it is known.
            reason: Last line of the backend's error, or the heartbeat's reason.
        """
        rank_group, tracker, peers = self._rank_group, self._progress_tracker, self._heartbeat.peers()
        hang = kind is HangDetected if peers.is_hang is None else peers.is_hang
        behind = peers.furthest_behind
        this_rank = self._this_rank
        if hang and not peers.missing and (behind is None or progress_order(tracker) < progress_order(behind[1])):
            process = f"process {os.getpid()} on {socket.gethostname()}"
            others = "; the others wait for it" if behind else ""
            problem = f"{this_rank} makes no progress ({process}, in {tracker}){others}"
        else:
            event = "timed out waiting for its peers" if hang else "lost a peer"
            problem = f"{this_rank} {event} in {collective} ({tracker}): {peers}"
        advice = "The newest checkpoint is kept: start the same command again."
        if hang:
            limits = f"launch.timeout_seconds (now {rank_group.timeout_seconds:g}) and launch.hang_seconds"
            advice += f" Raise {limits} if a step can take that long."
            if self._stack_directory is not None:
                advice += f" The stacks of each rank are in {self._stack_directory}."
        return (HangDetected if hang else PeerLost)(f"{problem}\n{reason}\n{advice}")
