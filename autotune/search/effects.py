"""What each knob is worth around the answer: put back singly, and launched beside it.

Once the verdict is given and with what is left of the budget. Put back alone, knobs do not add up
to the whole: precision may be worth more at the batch that it made possible. It explains, and
claims nothing: a few rounds, each of one launch of every config on the same data.
"""

import math
import random
import statistics
from collections.abc import Iterator, Sequence

from scipy import stats

from autotune.knobs import KNOBS
from autotune.search.budget import BudgetSpent
from autotune.search.fits import Fits
from autotune.search.launcher import Ask, Entry, Launcher, windows_ahead
from autotune.search.plan import Plan
from autotune.space import Config
from autotune.summary import Effect
from autotune.verdict import Estimate

FEWEST_ROUNDS, MOST_ROUNDS = 2, 4
"""Two rounds are the fewest with a spread; after four an interval narrows little for its cost."""

SHARE = 0.25
"""Of the time that the search took, what explaining its answer may take at most."""

KNOWN_ERROR = 0.025
"""Chance that an interval misses on either side."""

NO_TIME = "no time was left to measure it"

TOGETHER = (
    ("batch_size", "accumulation_steps"),
    ("num_workers", "prefetch_factor", "persistent_workers"),
)
"""Knobs of which one means nothing without the others."""


def effects_of(
    launcher: Launcher, plan: Plan, fits: Fits, *, answer: Config, reference: Config
) -> tuple[Effect, ...]:
    """Return what each knob in which an answer differs is worth; launches what can be afforded.

    Args:
        launcher: What runs configs.
        plan: What a launch costs.
        fits: What fits; a knob may be worth that.
        answer: The config that is explained.
        reference: Whose values are put back.
    """
    rivals = {knobs: _put_back(answer, reference, knobs) for knobs in _changed(answer, reference)}
    reasons = {knobs: fits.reason_against(config) for knobs, config in rivals.items()}
    chosen = {knobs: config for knobs, config in rivals.items() if not reasons[knobs]}
    measured = dict(_measured(launcher, plan, answer, chosen))
    return tuple(
        Effect(
            knobs=knobs,
            value=reference.to_dict()[knobs[0]],
            estimate=measured.get(knobs),
            reason="" if knobs in measured else reasons[knobs] or NO_TIME,
        )
        for knobs in rivals
    )


def _changed(answer: Config, reference: Config) -> Iterator[tuple[str, ...]]:
    """Yield the knobs that differ, those together that belong together."""
    new, old = answer.to_dict(), reference.to_dict()
    alone = ((knob,) for knob in KNOBS if not any(knob in group for group in TOGETHER))
    for knobs in (*TOGETHER, *alone):
        if any(new[knob] != old[knob] for knob in knobs):
            yield knobs


def _put_back(answer: Config, reference: Config, knobs: Sequence[str]) -> Config:
    old = reference.to_dict()
    return Config.from_dict(answer.to_dict() | {knob: old[knob] for knob in knobs})


def _measured(
    launcher: Launcher, plan: Plan, answer: Config, rivals: dict[tuple[str, ...], Config]
) -> Iterator[tuple[tuple[str, ...], Estimate]]:
    """Yield what was measured, of as many as can be afforded."""
    chosen = _affordable(launcher, plan, answer, rivals)
    if not chosen:
        return
    rounds = _run(launcher, plan, [answer, *chosen.values()])
    ratios = {
        knobs: [times[config] - times[answer] for times in rounds if config in times]
        for knobs, config in chosen.items()
    }
    told = {knobs: each for knobs, each in ratios.items() if len(each) >= FEWEST_ROUNDS}
    for knobs, each in told.items():
        yield knobs, _estimate(each, spreads=list(told.values()))


def _affordable(
    launcher: Launcher, plan: Plan, answer: Config, rivals: dict[tuple[str, ...], Config]
) -> dict[tuple[str, ...], Config]:
    """Return the rivals of which the fewest rounds can be had, the cheapest first."""
    budget, room = launcher.budget, _room(launcher)
    chosen: dict[tuple[str, ...], Config] = {}
    seconds = FEWEST_ROUNDS * plan.cost(answer, "train")
    for knobs, config in sorted(rivals.items(), key=lambda item: plan.cost(item[1], "train")):
        seconds += FEWEST_ROUNDS * plan.cost(config, "train")
        launches = FEWEST_ROUNDS * (2 + len(chosen))
        if seconds > room or launches > budget.remaining_launches:
            break
        chosen[knobs] = config
    return chosen


def _room(launcher: Launcher) -> float:
    """Return the seconds that may be used."""
    budget = launcher.budget
    spent = sum(trial.wall_seconds for trial in launcher.trials)
    return min(budget.remaining_seconds, SHARE * spent)


def _run(launcher: Launcher, plan: Plan, configs: list[Config]) -> list[dict[Config, float]]:
    """Return log seconds per sample in each round, of those whose launch did not fail."""
    cycles = plan.cycles_together(configs)
    ahead = windows_ahead(configs)
    asks = [
        Ask(config=each, purpose="train", phase="F", cycles=cycles[each], skip_windows=ahead)
        for each in configs
    ]
    rounds: list[dict[Config, float]] = []
    with launcher.racing(asks) as entries:
        for number in range(_rounds(launcher, plan, configs)):
            times = _round(launcher, entries, number=number)
            if times is None:
                break
            rounds.append(times)
    return rounds


def _rounds(launcher: Launcher, plan: Plan, configs: list[Config]) -> int:
    """Return how many rounds there is room for.

    Told beforehand, of what launches took: a run that goes on, whose launches were made, makes as
    many.
    """
    seconds = sum(plan.cost(each, "train") for each in configs)
    by_launches = launcher.budget.remaining_launches / len(configs)
    return min(MOST_ROUNDS, int(min(_room(launcher) / seconds, by_launches)))


def _round(
    launcher: Launcher, entries: Sequence[Entry], *, number: int
) -> dict[Config, float] | None:
    """Return log seconds per sample of each config, launched in random order; None if cut short."""
    configs = [entry.ask.config for entry in entries]
    seed = launcher.new_seed("effects", *configs)
    order = random.Random(f"{launcher.task.seed} effects {number}")  # noqa: S311  # no secret
    times: dict[Config, float] = {}
    try:
        for entry in order.sample(entries, len(entries)):
            time = launcher.timed(entry, seed=seed)
            if time is not None:
                times[entry.ask.config] = time
    except BudgetSpent:
        return None
    return times if configs[0] in times else None


def _estimate(ratios: Sequence[float], *, spreads: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean ratio with its 95 % interval, by Student's t.

    Args:
        ratios: Log ratios of a knob.
        spreads: Those of all knobs, whose launches are taken to spread alike: two rounds of one
            alone say next to nothing of its spread.
    """
    freedom = sum(len(each) - 1 for each in spreads)
    squares = sum(statistics.variance(each) * (len(each) - 1) for each in spreads)
    mean, error = statistics.fmean(ratios), math.sqrt(squares / freedom / len(ratios))
    half = error * float(stats.t.isf(KNOWN_ERROR, freedom))
    return Estimate(
        value=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        pairs=len(ratios),
        is_confirmed=False,
    )
