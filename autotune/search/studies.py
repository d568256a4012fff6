"""The Optuna studies: every trial of a search as a trial of Optuna, and Optuna's own proposals.

One storage holds five studies, one objective each: `memory` (GiB), `compute`, `loader` and `e2e`
(log seconds per sample), `checks` (0). Parameters have their real values; where a knob has none (no
workers to prefetch, PyTorch's own number of threads) the value is 0. A trial is added whole when it
has ended, so that a run that is killed leaves none half told and none is taken by another run.
Beside `storage` this is the only module that imports Optuna.
"""

import math
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from statistics import fmean
from typing import Any, assert_never

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState

from autotune.outcome import (
    Crashed,
    Invalid,
    Measured,
    Measurement,
    OutOfMemory,
    Skipped,
    TimedOut,
    Trial,
)
from autotune.search.proposals import box_around, snapped
from autotune.search.storage import lease, open_storage, open_study, quiet
from autotune.space import CHECKPOINTING, PRECISIONS, SWITCHES, Config, SearchSpace

STUDIES = ("memory", "compute", "loader", "e2e", "checks")
"""The names of the studies in a storage, each after the search's own name and a slash."""

MEMORY_CONSTRAINT = "device_mem"
"""Peak over limit, less 1; predicted where it was not measured. Above 0 a trial is infeasible."""

UNSETTLED_CONSTRAINT = "awaits_verdict"
"""1 where a trial only chose, in a race; so `best_trial` is one whose figures were confirmed."""

ASSUMED_EXCESS = 0.1
"""The memory constraint of a trial that ran out of memory where no peak was predicted."""

PROPOSALS = 12
"""How often the sampler is asked anew where its proposal was tried or cannot be."""

_GIB = 2**30
_COUNTS = ("batch_size", "accumulation_steps", "num_workers", "prefetch_factor", "threads")
_LOGARITHMIC = ("batch_size", "accumulation_steps")
_HISTORY = 200


class Studies:
    """The five studies of one search in one storage.

    Args:
        storage: URL of the storage, as `open_storage` takes it; None keeps it in memory.
        name: Name of the search: a signature of model, device, limit and goal, so that a study
            never mixes what cannot be compared.
        space: Which configs may be tried.
        baseline: The configuration the user has today, which may lie outside the space.
        limit_bytes: The memory limit, which the constraint is relative to.
        seed: Seed of the sampler.

    Raises:
        OptionInvalid: If the storage cannot be used.
    """

    def __init__(
        self,
        storage: str | None,
        name: str,
        *,
        space: SearchSpace,
        baseline: Config,
        limit_bytes: int,
        seed: int,
    ) -> None:
        self._space = space
        self._limit_bytes = limit_bytes
        self._seed = seed
        self._asked = 0
        self._baseline = baseline
        self._measured: list[Trial] = []
        self._lease = lease()
        where = open_storage(storage)
        self._studies = {
            study: open_study(where, f"{name}/{study}", seed=seed) for study in STUDIES
        }
        self._held = {
            name: {_identity(trial) for trial in study.get_trials(deepcopy=False)}
            for name, study in self._studies.items()
        }

    def study(self, name: str) -> optuna.Study:
        """Return one of the five studies."""
        return self._studies[name]

    def record(self, trial: Trial, *, is_settled: bool = True) -> None:
        """Add a trial to its study, unless an earlier run added it already.

        Args:
            trial: What was tried.
            is_settled: Whether its figures may name the best trial of the study.
        """
        if trial.study == "e2e":
            self._measured.append(trial)
        state, objective = _ending(trial)
        constraint = self._memory_constraint(trial)
        known = {} if constraint is None else {MEMORY_CONSTRAINT: constraint}
        added = optuna.trial.create_trial(
            state=state,
            value=objective,
            params=_parameters(trial.config),
            distributions=_distributions(self._space, self._baseline, trial.config),
            user_attrs=_attributes(trial) | self._lease,
            intermediate_values=dict(enumerate(_reports(trial))),
            constraints=known | {UNSETTLED_CONSTRAINT: 0.0 if is_settled else 1.0},
        )
        added.datetime_start, added.datetime_complete = _times(trial)
        identity = _identity(added)
        if identity in self._held[trial.study]:
            return
        self._held[trial.study].add(identity)
        with quiet():
            self._studies[trial.study].add_trial(added)

    def recommend(self, trial: Trial) -> None:
        """Make an end-to-end trial's config that of `best_trial`, where it is not already.

        The figures of a race's winner await their verdict; where none could be had, they are
        entered once more as what is recommended.
        """
        if isinstance(trial.outcome, Measured) and self.best_config() != trial.config:
            self.record(trial)

    def best_config(self) -> Config | None:
        """Return the config of the end-to-end study's `best_trial`; None before there is one."""
        complete = self._studies["e2e"].get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        feasible = [t for t in complete if all(v <= 0 for v in t.constraints.values())]
        if not feasible:
            return None
        best = min(feasible, key=lambda t: math.inf if t.value is None else t.value)
        return Config.from_dict(_values(best.params))

    def propose(
        self,
        leader: Config,
        *,
        tried: Collection[Config],
        is_vetoed: Callable[[Config], bool],
        is_boxed: bool,
    ) -> Config | None:
        """Return a config that the sampler (TPE) holds to be promising, or None.

        It is warmed with the end-to-end trials so far, and what it proposes is moved to the
        nearest config of the space.

        Args:
            leader: The best config so far.
            tried: Configs that are not to be proposed again.
            is_vetoed: Whether a config is known not to fit.
            is_boxed: Whether to stay within two positions of the leader in each knob.
        """
        space = box_around(self._space, leader) if is_boxed else self._space
        distributions = _distributions(space, leader)
        del distributions["accumulation_steps"]  # follows from the batch size
        self._asked += 1
        with quiet():
            sampler = optuna.samplers.TPESampler(seed=self._seed + self._asked)
            scratch = optuna.create_study(sampler=sampler)
            scratch.add_trials(self._history(distributions))
            for _ in range(PROPOSALS):
                asked = scratch.ask(distributions)
                config = snapped(_values(asked.params), self._space, leader=leader)
                if config not in tried and not is_vetoed(config):
                    return config
                scratch.tell(asked, state=TrialState.FAIL)
        return None

    def _history(self, distributions: dict[str, BaseDistribution]) -> list[FrozenTrial]:
        """Return the end-to-end trials that lie within what is sampled, as that knows them."""
        found = []
        for trial in self._measured[-_HISTORY:]:
            everything = _parameters(trial.config)
            parameters = {name: everything[name] for name in distributions}
            state, value = _ending(trial)
            if state == TrialState.FAIL or not _holds(distributions, parameters):
                continue
            constraint = self._memory_constraint(trial)
            found.append(
                optuna.trial.create_trial(
                    state=state,
                    value=value,
                    params=parameters,
                    distributions=distributions,
                    constraints=None if constraint is None else {MEMORY_CONSTRAINT: constraint},
                )
            )
        return found

    def _memory_constraint(self, trial: Trial) -> float | None:
        measured = trial.measured
        peak = measured.peak_bytes if measured else trial.predicted_peak_bytes
        over = peak / self._limit_bytes - 1 if peak else None
        if isinstance(trial.outcome, OutOfMemory):
            return over if over is not None and over > 0 else ASSUMED_EXCESS
        return over


def _distributions(space: SearchSpace, *configs: Config) -> dict[str, BaseDistribution]:
    """Return one distribution for each knob, wide enough for the space and some configs."""
    found: dict[str, BaseDistribution] = {
        "amp": CategoricalDistribution(PRECISIONS),
        "checkpointing": CategoricalDistribution(CHECKPOINTING),
        **{name: CategoricalDistribution((False, True)) for name in SWITCHES},
    }
    steps = [steps for _, steps in space.splits()]
    for name in _COUNTS:
        choices = steps if name == "accumulation_steps" else space.choices(name)
        others = (getattr(config, name) for config in configs)
        numbers = [int(value or 0) for value in (*choices, *others)]
        if name == "prefetch_factor":
            numbers.append(0)  # without workers there is nothing to prefetch
        found[name] = IntDistribution(min(numbers), max(numbers), log=name in _LOGARITHMIC)
    return found


def _parameters(config: Config) -> dict[str, bool | int | str]:
    """Return a config as parameters of Optuna; 0 where a knob has no value."""
    return {name: 0 if value is None else value for name, value in config.to_dict().items()}


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of Optuna as knob → value."""
    found = dict(parameters)
    if not found["num_workers"]:
        found |= {"prefetch_factor": None, "persistent_workers": False}
    return found | {
        name: found[name] or None for name in ("prefetch_factor", "threads") if name in found
    }


def _holds(
    distributions: Mapping[str, BaseDistribution], parameters: Mapping[str, bool | int | str]
) -> bool:
    return all(
        distribution.low <= int(parameters[name]) <= distribution.high
        for name, distribution in distributions.items()
        if isinstance(distribution, IntDistribution)
    )


def _attributes(trial: Trial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "phase": trial.phase,
        "outcome": trial.outcome.name,
        "reason": trial.outcome.reason,
        "is_reused": trial.is_reused,
        "launched_at": [launch.started_at for launch in trial.launches],
    }


def _identity(trial: FrozenTrial) -> tuple[object, ...]:
    """Return what two entries of one trial have in common: when its launches were, above all."""
    attributes = trial.user_attrs
    return (
        *(attributes.get(name) for name in ("phase", "outcome", "reason")),
        tuple(attributes.get("launched_at", ())),
        tuple(sorted(trial.params.items())),
        trial.constraints.get(UNSETTLED_CONSTRAINT),
    )


def _times(trial: Trial) -> tuple[datetime, datetime]:
    """Return when a trial began and ended, in local time without a zone, as Optuna has it."""
    told = trial.launches[0].started_at if trial.launches else trial.started_at
    began = datetime.fromisoformat(told) if told else datetime.now().astimezone()
    local = began.astimezone().replace(tzinfo=None)
    return local, local + timedelta(seconds=trial.wall_seconds)


def _ending(trial: Trial) -> tuple[TrialState, float | None]:
    """Return how Optuna is told that a trial ended, and its value."""
    match trial.outcome:
        case Measured(measurement=seen):
            value = _value(trial.study, seen)
            return (TrialState.FAIL if value is None else TrialState.COMPLETE), value
        case OutOfMemory() | Skipped():
            return TrialState.PRUNED, None
        case TimedOut() | Crashed() | Invalid():
            return TrialState.FAIL, None
        case _:
            assert_never(trial.outcome)


def _value(study: str, seen: Measurement) -> float | None:
    if study == "checks":
        return 0.0
    if study == "memory":
        return None if seen.peak_bytes is None else seen.peak_bytes / _GIB
    return -math.log(seen.samples_per_second) if seen.samples_per_second else None


def _reports(trial: Trial) -> list[float]:
    """Return log seconds per sample of each launch."""
    measured = trial.measured
    if trial.study in {"memory", "checks"} or measured is None:
        return []
    samples = measured.samples_per_optimizer_step or trial.config.samples_per_optimizer_step
    means = [fmean(launch.step_seconds) for launch in trial.launches if launch.step_seconds]
    return [math.log(mean / samples) for mean in means if mean > 0]
