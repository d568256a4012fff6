"""What `fit` and the command were asked for: given, else the script's, else the default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, get_args

from autotune.baseline import GlobalBatch
from autotune.errors import OptionInvalid
from autotune.facts import Survey
from autotune.knobs import knob_names, unknown_knob
from autotune.space import Config, Goal
from autotune.units import is_whole, parse_bytes, parse_duration

DEFAULT_TIME_BUDGET = "10min"

CPU_MARGIN = 0.15
"""Share of a CPU's free memory that the default limit leaves: other processes live there too."""

CUDA_MARGIN = 0.05
"""As `CPU_MARGIN`, of a GPU: what libraries take outside the allocator (METHOD.md D.1)."""

ROUNDED_BITS = 5
"""Of a default limit; what is lost is 6 % at most."""

SCAN_SHARE = 0.03
"""Of the budget, for the scan after the largest samples (DESIGN 8.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for; None where nothing was said.

    Args:
        baseline: The configuration the user has today.
        global_batch: Samples per optimizer step, or `"free"`.
        memory: The limit, as `units.parse_bytes` takes it.
        time_budget: As `units.parse_duration` takes it.
        trials: Most launches.
        space: Knob → values to try.
        goal: `throughput` or `memory`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        seed: Of the search and of the data's order.
        out: Folder of the results.
        fresh: Whether to measure anew what an earlier run in that folder measured.
        storage: Of the Optuna studies; None keeps them in the folder.
        study_name: Of the studies in that storage; None makes one of what is tuned.

    Raises:
        OptionInvalid: If a value means nothing.
    """

    baseline: Config | Mapping[str, Any] | None = None
    global_batch: GlobalBatch = None
    memory: str | float | None = None
    time_budget: str | float | None = None
    trials: int | None = None
    space: Mapping[str, Sequence[Any]] | None = None
    goal: Goal | None = None
    device: str | None = None
    seed: int | None = None
    out: str | None = None
    fresh: bool | None = None
    storage: str | None = None
    study_name: str | None = None

    def __post_init__(self) -> None:
        parse_duration(self.time_budget or DEFAULT_TIME_BUDGET)
        parse_bytes(1 if self.memory is None else self.memory, free_bytes=2**40)
        _require_goal(self.goal)
        _require_global_batch(self.global_batch)
        for name, least in _LEAST.items():
            _require_at_least(name, getattr(self, name), least)
        _require_knobs(self.space or {})

    @property
    def time_seconds(self) -> float:
        """The budget in seconds."""
        return parse_duration(self.time_budget or DEFAULT_TIME_BUDGET)

    @property
    def scan_seconds(self) -> float:
        """How long to look for the largest samples."""
        return SCAN_SHARE * self.time_seconds

    def over(self, script_options: Mapping[str, Any]) -> Self:
        """Return these options, a script's `autotune_options` where nothing was given.

        Raises:
            OptionInvalid: If the script names an option that there is not.
        """
        _require_options(script_options)
        silent = {
            name: value for name, value in script_options.items() if getattr(self, name) is None
        }
        return replace(self, **silent)

    def limit_bytes(self, survey: Survey) -> int:
        """Return the memory limit of a run (DESIGN 2.2, row `memory`).

        Raises:
            OptionInvalid: If it is no size.
        """
        free = survey.device.free_bytes
        if self.memory is not None:
            return parse_bytes(self.memory, free_bytes=free)
        if survey.device.kind == "cpu":
            return _rounded(int((1 - CPU_MARGIN) * (free - survey.overhead_bytes)))
        return _rounded(int((1 - CUDA_MARGIN) * free))


_LEAST = {"trials": 1, "seed": 0}


def _require_goal(goal: object) -> None:
    if goal not in (None, *get_args(Goal)):
        raise OptionInvalid(f"goal needs throughput or memory, but got {goal!r}")


def _require_global_batch(samples: object) -> None:
    if samples not in (None, "free") and not (is_whole(samples) and samples >= 1):
        raise OptionInvalid(
            f'global_batch needs a number of samples or "free", but got {samples!r}'
        )


def _require_at_least(name: str, value: object, least: int) -> None:
    if value is not None and not (is_whole(value) and value >= least):
        raise OptionInvalid(f"{name} needs a whole number from {least} on, but got {value!r}")


def _require_knobs(space: Mapping[str, object]) -> None:
    unknown = sorted(set(space) - set(knob_names()))
    if unknown:
        raise unknown_knob(unknown[0])


def _require_options(script_options: Mapping[str, object]) -> None:
    known = {item.name for item in fields(Options)}
    unknown = sorted(set(script_options) - known)
    if unknown:
        raise OptionInvalid(
            f"autotune_options has no option named {unknown[0]!r}",
            hint=f"the options are: {', '.join(sorted(known))}",
        )


def _rounded(limit_bytes: int) -> int:
    """Return a default limit rounded down, so that the next run on this machine has it too."""
    step = 1 << max(limit_bytes.bit_length() - ROUNDED_BITS, 0)
    return limit_bytes // step * step
