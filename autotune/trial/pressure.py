"""Trouble with memory that no allocation tells of: spills, and other processes that take more.

A driver that gives the host's memory where the GPU's is full, and a system that swaps, fail
nowhere and slow everything down (CASES.md row 116): what was measured must not be used. Others that
take more of a device while a launch runs may be why it runs short, which is worth a word.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from autotune.device.base import Device
from autotune.outcome import Invalid, Measured, Outcome, OutOfMemory
from autotune.trial.measure import Cycle
from autotune.units import format_bytes

SPILLED_BYTES = 64 * 2**20
"""Less is no spill: a driver rounds, and a system swaps out what nobody uses."""

TAKEN_BYTES = 256 * 2**20
"""Less is not worth a word: a desktop's windows come and go."""

CLIFF = 4.0
"""So many times as slow for good, steps no longer do the same: memory behind a bus is 10 to 50
times as slow as a device's own, other work on a machine rarely takes more than half of it."""

FEWEST_CYCLES = 6
"""Of which a cliff can be told: a third before, and a third after."""


class Pressure:
    """How it stood with the device's memory when a launch began.

    Args:
        device: Whose memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spilled_bytes = device.spilled_bytes()
        self._others_bytes = device.others_bytes()

    def judged(self, outcome: Outcome) -> Outcome:
        """Return an outcome with what became of the device's memory meanwhile.

        To be called before anything is given back.
        """
        spilled = self._device.spilled_bytes() - self._spilled_bytes
        if isinstance(outcome, Measured) and spilled >= SPILLED_BYTES:
            return Invalid(reason=_SPILLS[self._device.kind].format(format_bytes(spilled)))
        taken = self._taken()
        if taken and isinstance(outcome, Measured | OutOfMemory):
            return replace(outcome, reason="; ".join(filter(None, [outcome.reason, taken])))
        return outcome

    def _taken(self) -> str:
        """Return that others took more of the device, if they did."""
        now = self._device.others_bytes()
        if now is None or self._others_bytes is None or now - self._others_bytes < TAKEN_BYTES:
            return ""
        return (
            f"other processes took {format_bytes(now - self._others_bytes)} more of the device "
            "meanwhile"
        )


_SPILLS = {
    "cuda": "{} lay in the host's memory: the GPU's was full, and its driver does not say so",
    "cpu": "{} were swapped out while it ran",
}


def cliff(cycles: Sequence[Cycle]) -> str:
    """Return that steps of equal work became many times as slow, and stayed so; else nothing."""
    if len(cycles) < FEWEST_CYCLES or len({cycle.work_bytes for cycle in cycles}) > 1:
        return ""
    seconds = [cycle.seconds - cycle.wait_seconds for cycle in cycles]
    third = len(seconds) // 3
    before, after = statistics.median(seconds[:third]), min(seconds[-third:])
    if not before or after < CLIFF * before:
        return ""
    return f"its steps became {after / before:.0f} times as slow while it ran, and stayed so"
