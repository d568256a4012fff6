"""The Optuna studies: every trial of a search as a trial of Optuna, and Optuna's own proposals.

One storage holds five studies, one objective each: `memory` (GiB), `compute`, `loader` and `e2e`
(log seconds per sample), `checks` (0). Parameters have their real values; where a knob has none (no
workers to prefetch, PyTorch's own number of threads) the value is 0. A trial is added whole when it
has ended, so that a run that is killed leaves none half told and none is taken by another run.
Beside `storage` this is the only module that imports Optuna.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from statistics import fmean
from typing import Any, assert_never

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.knobs import KNOBS, Value
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
from autotune.space import Config, SearchSpace

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
_LOGARITHMIC = ("batch_size", "accumulation_steps")
_OPTIONAL = tuple(name for name, knob in KNOBS.items() if knob.has_default)
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
            study: set(map(_identity, kept.get_trials(deepcopy=False)))
            for study, kept in self._studies.items()
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
        added = self._entry(trial, is_settled=is_settled)
        identity = _identity(added)
        if identity in self._held[trial.study]:
            return
        self._held[trial.study].add(identity)
        with quiet():
            self._studies[trial.study].add_trial(added)

    def _entry(self, trial: Trial, *, is_settled: bool) -> FrozenTrial:
        """Return a trial as its study holds it."""
        state, objective = _ending(trial)
        settled = {UNSETTLED_CONSTRAINT: float(not is_settled)}
        entry = optuna.trial.create_trial(
            state=state,
            value=objective,
            params=_parameters(trial.config),
            distributions=_distributions(self._space, self._baseline, trial.config),
            user_attrs=_attributes(trial) | self._lease,
            intermediate_values=dict(enumerate(_reports(trial))),
            constraints=self._memory_constraint(trial) | settled,
        )
        entry.datetime_start, entry.datetime_complete = _times(trial)
        return entry

    def recommend(self, trial: Trial) -> None:
        """Make an end-to-end trial's config that of `best_trial`, where it is not already.

        The figures of a race's winner await their verdict; where none could be had, they are
        entered once more as what is recommended.
        """
        if trial.measured and self.best_config() != trial.config:
            self.record(trial)

    def best_config(self) -> Config | None:
        """Return the config of the end-to-end study's `best_trial`; None before there is one."""
        complete = self._studies["e2e"].get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        best = min(filter(_is_feasible, complete), key=_objective, default=None)
        return Config.from_dict(_values(best.params)) if best else None

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
        recent = self._measured[-_HISTORY:]
        telling = [trial for trial in recent if _tells(trial, distributions)]
        return [self._sampled(trial, distributions) for trial in telling]

    def _sampled(self, trial: Trial, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
        """Return a trial as the sampler knows it."""
        everything = _parameters(trial.config)
        state, value = _ending(trial)
        return optuna.trial.create_trial(
            state=state,
            value=value,
            params={name: everything[name] for name in distributions},
            distributions=distributions,
            constraints=self._memory_constraint(trial) or None,
        )

    def _memory_constraint(self, trial: Trial) -> dict[str, float]:
        """Return how far a trial is over the limit, as a constraint; none where that is unknown."""
        over = self._over_limit(trial)
        if isinstance(trial.outcome, OutOfMemory) and over <= 0:
            over = ASSUMED_EXCESS
        return {} if math.isinf(over) else {MEMORY_CONSTRAINT: over}

    def _over_limit(self, trial: Trial) -> float:
        """Return peak over limit, less 1; minus infinity where no peak is known."""
        peak = trial.peak_bytes if trial.measured else trial.predicted_peak_bytes
        return peak / self._limit_bytes - 1 if peak else -math.inf


def _distributions(space: SearchSpace, *configs: Config) -> dict[str, BaseDistribution]:
    """Return one distribution for each knob, wide enough for the space and some configs."""
    return {name: _distribution(space, configs, name) for name in KNOBS}


def _distribution(space: SearchSpace, configs: Sequence[Config], name: str) -> BaseDistribution:
    knob = KNOBS[name]
    if knob.is_switch or knob.words:
        return CategoricalDistribution(knob.words or (False, True))
    return _range(space, configs, name)


def _range(space: SearchSpace, configs: Sequence[Config], name: str) -> IntDistribution:
    others = [getattr(config, name) for config in configs]
    numbers = [int(value or 0) for value in (*_counts(space, name), *others)]
    return IntDistribution(min(numbers), max(numbers), log=name in _LOGARITHMIC)


def _counts(space: SearchSpace, name: str) -> Sequence[Value]:
    """Return what a knob that counts may be set to in a space."""
    if name == "accumulation_steps":
        return [steps for _, steps in space.splits()]
    if name == "prefetch_factor":
        return (*space.choices(name), None)  # without workers there is nothing to prefetch
    return space.choices(name)


def _parameters(config: Config) -> dict[str, bool | int | str]:
    """Return a config as parameters of Optuna; 0 where a knob has no value."""
    return {name: 0 if value is None else value for name, value in config.to_dict().items()}


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of Optuna as knob → value."""
    found = dict(parameters) | {name: parameters[name] or None for name in _OPTIONAL}
    if not found["num_workers"]:
        found |= {"prefetch_factor": None, "persistent_workers": False}
    return found


def _holds(
    distributions: Mapping[str, BaseDistribution], parameters: Mapping[str, bool | int | str]
) -> bool:
    return all(
        distribution.low <= int(parameters[name]) <= distribution.high
        for name, distribution in distributions.items()
        if isinstance(distribution, IntDistribution)
    )


def _tells(trial: Trial, distributions: Mapping[str, BaseDistribution]) -> bool:
    """Whether a trial has a value, or was pruned, within what is sampled."""
    state, _ = _ending(trial)
    return state != TrialState.FAIL and _holds(distributions, _parameters(trial.config))


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


def _is_feasible(trial: FrozenTrial) -> bool:
    return all(excess <= 0 for excess in trial.constraints.values())


def _objective(trial: FrozenTrial) -> float:
    return math.inf if trial.value is None else trial.value


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
            value = _VALUES[trial.study](seen)
            return (TrialState.FAIL if value is None else TrialState.COMPLETE), value
        case OutOfMemory() | Skipped():
            return TrialState.PRUNED, None
        case TimedOut() | Crashed() | Invalid():
            return TrialState.FAIL, None
        case _:
            assert_never(trial.outcome)


def _peak_gib(seen: Measurement) -> float | None:
    return None if seen.peak_bytes is None else seen.peak_bytes / _GIB


def _log_seconds(seen: Measurement) -> float | None:
    return -math.log(seen.samples_per_second) if seen.samples_per_second else None


_VALUES: Mapping[str, Callable[[Measurement], float | None]] = {
    "memory": _peak_gib,
    "compute": _log_seconds,
    "loader": _log_seconds,
    "e2e": _log_seconds,
    "checks": lambda _seen: 0.0,
}
"""The objective of each study."""


def _reports(trial: Trial) -> list[float]:
    """Return log seconds per sample of each launch."""
    if trial.measured is None or _VALUES[trial.study] is not _log_seconds:
        return []
    samples = trial.measured.samples_per_optimizer_step or trial.config.samples_per_optimizer_step
    timed = [launch.step_seconds for launch in trial.launches if any(launch.step_seconds)]
    return [math.log(fmean(seconds) / samples) for seconds in timed]
