"""The numerics guard: no config enters a race before its gradients agree with the baseline's.

Speed that changes the mathematics beyond what the user allowed is not speed (DESIGN 1). Where a
config disagrees, at most four further checks find which part of it is to blame. A larger batch
that is not accumulated, where the effective batch is free, is what the user allowed: whether its
loss depends on which samples are together is looked at once, and said.
"""

from collections.abc import Mapping
from dataclasses import replace

from autotune.knobs import Value
from autotune.outcome import Invalid, Measured, Outcome
from autotune.search.launcher import Ask, Launcher
from autotune.space import Config, divisors

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
        self._reasons: dict[Key, str] = {}
        self._bad: set[tuple[str, Value]] = set()
        self._is_split_known = len(divisors(reference.batch_size)) == 1  # one sample is not cut
        self._is_split_locked = False
        self.notes: list[str] = []

    def allows(self, config: Config) -> bool:
        """Whether nothing that is known speaks against a config; launches nothing."""
        if any((knob, getattr(config, knob)) in self._bad for knob in _BLAMED):
            return False
        if self._is_split_locked and _split(self._held(config)) != _split(self._reference):
            return False
        return self._known.get(_key(self._held(config)), True)

    def knows(self, config: Config) -> bool:
        """Whether a config's gradients have been compared."""
        held = self._held(config)
        is_told = self._is_split_known or _split(held) == _split(config)
        return is_told and _key(held) in self._known

    def admits(self, config: Config, *, phase: str) -> bool:
        """Return whether a config's gradients agree, by a check where that is not known.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        if not self.allows(config):
            return False
        held = self._held(config)
        if _split(held) != _split(config) and not self._is_split_known:
            self._look_at_the_split(phase=phase)
        if _key(held) not in self._known and self._disagrees(held, phase=phase):
            self._find_the_blame(held, phase=phase)
        return self._known[_key(held)]

    def _held(self, config: Config) -> Config:
        """Return what of a config is held to the reference: all but a batch that it may enlarge."""
        own = self._reference
        is_same = config.samples_per_optimizer_step == own.samples_per_optimizer_step
        if is_same or config.accumulation_steps > 1:
            return config
        return _with_split(config, _split(own))

    def _look_at_the_split(self, *, phase: str) -> None:
        """Compare the reference with itself in smaller pieces: do its samples count alone?"""
        own = self._reference
        size = divisors(own.batch_size)[-2]
        smaller = _with_split(own, (size, own.samples_per_optimizer_step // size))
        if self._disagrees(smaller, phase=phase):
            self._lock_split(smaller)
        self._is_split_known = True

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
            self._is_split_known |= self._settles_the_split(config, outcome)
            if isinstance(outcome, Invalid):
                self._reasons[key] = outcome.reason
        return key in self._reasons

    def _settles_the_split(self, config: Config, outcome: Outcome) -> bool:
        """Whether a check tells by itself how another split comes out: where it agrees."""
        is_other = _split(config) != _split(self._reference)
        return is_other and isinstance(outcome, Measured)

    def _find_the_blame(self, config: Config, *, phase: str) -> None:
        """Drop what disagrees by itself: precision, checkpointing or layout; or lock the split."""
        own = self._reference
        for knob in _BLAMED:
            value = getattr(config, knob)
            alone = Config.from_dict(own.to_dict() | {knob: value})
            if value != getattr(own, knob) and self._disagrees(alone, phase=phase):
                self._drop(knob, alone)
        as_own = {knob: getattr(own, knob) for knob in _BLAMED}
        split_alone = Config.from_dict(config.to_dict() | as_own)
        if _split(config) != _split(own) and self._disagrees(split_alone, phase=phase):
            self._lock_split(split_alone)

    def _drop(self, knob: str, alone: Config) -> None:
        value = getattr(alone, knob)
        self._bad.add((knob, value))
        told = _TOLD.get((knob, value), str(value))
        self.notes.append(
            f"{told} is not used: its gradients disagree with the baseline's "
            f"({self._reasons[_key(alone)]})"
        )

    def _lock_split(self, split_alone: Config) -> None:
        """Keep the baseline's split, where it is the split that changes the gradients."""
        self._is_split_locked = True
        task = self._launcher.task
        why = _OF_BATCH_NORM if task.workload.has_batch_norm else _OF_LOSS
        found = f"({self._reasons[_key(split_alone)]}): {why}"
        size = self._reference.batch_size
        if task.space.global_batch is not None:
            self.notes.append(
                f"the batch size stays at {size}: split otherwise, the gradients of a step "
                f"disagree with the baseline's {found}"
            )
        else:
            self.notes.append(
                f"no other batch is accumulated, and a batch other than {size} is another loss, "
                f"not only a larger step: split, its gradients disagree {found}"
            )


_OF_BATCH_NORM = "BatchNorm takes its mean over the micro-batch"
_OF_LOSS = (
    "the loss is no mean over samples, as where they are compared with each other or count "
    "unequally; for the latter loss_fn may return (loss_sum, count)"
)


_TOLD: Mapping[tuple[str, Value], str] = {
    ("checkpointing", "full"): "checkpointing",
    ("checkpointing", "alternate"): "checkpointing of every second block",
    ("checkpointing", "selective"): "checkpointing but for matmuls and attention",
    ("checkpointing", "selective_matmul"): "checkpointing but for matmuls",
    ("checkpointing", "off"): "a step without checkpointing",
    ("channels_last", True): "the layout with channels last",
    ("channels_last", False): "a layout without channels last",
}
"""Knob and value → how they are called, where the value alone would not say it."""


def _split(config: Config) -> tuple[int, int]:
    return config.batch_size, config.accumulation_steps


def _with_split(config: Config, split: tuple[int, int]) -> Config:
    return replace(config, batch_size=split[0], accumulation_steps=split[1])


def _key(config: Config) -> Key:
    return (config.amp, config.checkpointing, config.channels_last, *_split(config))
