"""The numerics guard: no config enters a race before its gradients agree with the baseline's.

Speed that changes the mathematics beyond what the user allowed is not speed (DESIGN 1). Where a
config disagrees, at most four further checks find which part of it is to blame.
"""

from collections.abc import Mapping
from dataclasses import replace

from autotune.knobs import Value
from autotune.outcome import Invalid, Measured
from autotune.search.launcher import Ask, Launcher
from autotune.space import Config

CHECK_CYCLES = 1
"""Optimizer steps whose gradients are compared."""

_BLAMED = ("amp", "checkpointing", "channels_last")
"""Knobs of which a value is dropped that disagrees by itself."""

Key = tuple[str, str, bool, int, int]


class Guard:
    """Checks configs against the reference: each precision, checkpointing, layout and split once.

    Args:
        launcher: What runs a check.
        reference: The config whose gradients are right.

    Attributes:
        notes: What was locked, in sentences.
    """

    def __init__(self, launcher: Launcher, reference: Config) -> None:
        self._launcher = launcher
        self._reference = reference
        self._known: dict[Key, bool] = {_key(reference): True}
        self._bad: set[tuple[str, Value]] = set()
        self._is_split_locked = False
        self._disagreeing: set[Key] = set()
        self.notes: list[str] = []

    def allows(self, config: Config) -> bool:
        """Whether nothing that is known speaks against a config; launches nothing."""
        if any((knob, getattr(config, knob)) in self._bad for knob in _BLAMED):
            return False
        if self._is_split_locked and _split(config) != _split(self._reference):
            return False
        return self._known.get(_key(config), True)

    def knows(self, config: Config) -> bool:
        """Whether a config's gradients have been compared."""
        return _key(config) in self._known

    def admits(self, config: Config, *, phase: str) -> bool:
        """Return whether a config's gradients agree, by a check where that is not known.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        if not self.allows(config):
            return False
        if _key(config) not in self._known and self._disagrees(config, phase=phase):
            self._find_the_blame(config, phase=phase)
        return self._known[_key(config)]

    def _disagrees(self, config: Config, *, phase: str) -> bool:
        """Whether gradients differ; a check that cannot be had speaks against the config alone."""
        key = _key(config)
        if key not in self._known:
            loads_as_reference = replace(
                self._reference,
                batch_size=config.batch_size,
                accumulation_steps=config.accumulation_steps,
                amp=config.amp,
                checkpointing=config.checkpointing,
                channels_last=config.channels_last,
            )
            ask = Ask(
                config=loads_as_reference,
                purpose="check",
                phase=phase,
                cycles=CHECK_CYCLES,
                against=self._reference,
                is_limited=False,
            )
            outcome = self._launcher.run(ask).outcome
            self._known[key] = isinstance(outcome, Measured)
            if isinstance(outcome, Invalid):
                self._disagreeing.add(key)
        return key in self._disagreeing

    def _find_the_blame(self, config: Config, *, phase: str) -> None:
        """Drop what disagrees by itself: precision, checkpointing or layout; or lock the split."""
        own = self._reference
        for knob in _BLAMED:
            value = getattr(config, knob)
            alone = Config.from_dict(own.to_dict() | {knob: value})
            if value != getattr(own, knob) and self._disagrees(alone, phase=phase):
                self._drop(knob, value)
        as_own = {knob: getattr(own, knob) for knob in _BLAMED}
        split_alone = Config.from_dict(config.to_dict() | as_own)
        if _split(config) != _split(own) and self._disagrees(split_alone, phase=phase):
            self._lock_split()

    def _drop(self, knob: str, value: Value) -> None:
        self._bad.add((knob, value))
        told = _TOLD.get((knob, value), str(value))
        self.notes.append(f"{told} is not used: its gradients disagree with the baseline's")

    def _lock_split(self) -> None:
        """Keep the baseline's split, where it is the split that changes the gradients."""
        self._is_split_locked = self._launcher.task.space.global_batch is not None
        if self._is_split_locked:
            size = self._reference.batch_size
            self.notes.append(
                f"the batch size stays at {size}: split otherwise, the gradients of a step "
                "disagree with the baseline's"
            )


_TOLD: Mapping[tuple[str, Value], str] = {
    ("checkpointing", "full"): "checkpointing",
    ("checkpointing", "off"): "a step without checkpointing",
    ("channels_last", True): "the layout with channels last",
    ("channels_last", False): "a layout without channels last",
}
"""Knob and value → how they are called, where the value alone would not say it."""


def _split(config: Config) -> tuple[int, int]:
    return config.batch_size, config.accumulation_steps


def _key(config: Config) -> Key:
    return (config.amp, config.checkpointing, config.channels_last, *_split(config))
