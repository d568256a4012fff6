"""Launches in this process, for what cannot be sent to another; everything is put back.

A crash takes the caller along and a hang is not ended: `isolate` is better where it works.
"""

from contextlib import AbstractContextManager
from typing import Self

from autotune.device.base import find_device
from autotune.facts import Survey
from autotune.outcome import Report, Request
from autotune.step.restore import borrowed
from autotune.trial.launch import attempt, reading
from autotune.trial.survey import survey
from autotune.workload import Workload


class InProcess:
    """A runner that borrows the caller's process for each launch.

    Args:
        workload: What is tuned; a live model is trained in place and put back.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        DeviceMissing: If the device is not there.
    """

    def __init__(self, workload: Workload, *, device: str) -> None:
        self._workload = workload
        self._device = find_device(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def survey(self, *, scan_seconds: float) -> Survey:
        """Return what the workload and the device are.

        Raises:
            AutotuneError: If the workload cannot be tuned as it is.
        """
        with self._borrowed(), reading():
            return survey(self._workload, self._device, scan_seconds=scan_seconds)

    def __call__(self, request: Request) -> Report:
        """Run a request here; weights, modes, hooks, flags and random numbers are put back."""
        with self._borrowed():
            return attempt(self._workload, self._device, request)

    def _borrowed(self) -> AbstractContextManager[None]:
        return borrowed(self._workload.live_model, *self._workload.generators)

    def close(self) -> None:
        """Give back what the device still holds."""
        self._device.release()
