"""The phases of a search, in order of value: stopping after any of them leaves a usable answer.

A: memory, then time without a loader · B: threads and cuDNN at the best size · D: the loader alone
· E: a race of the best few · F: refinement around the leader (METHOD.md D.1).
"""

from collections.abc import Iterator
from dataclasses import replace

from autotune.search.choice import in_order
from autotune.search.fits import Fits
from autotune.search.launcher import MEMORY_CYCLES, Launcher
from autotune.search.loading import Loading, drain
from autotune.search.numerics import CHECK_CYCLES, Guard
from autotune.search.plan import Plan
from autotune.search.race import Race, Rules, Standing
from autotune.search.rivals import Knowledge, best_workers, fast_enough, rivals
from autotune.search.sizes import cells, find_sizes
from autotune.search.speeds import Speeds
from autotune.space import Config

CLEARLY_FASTER = 1.2
"""Where the best rival is predicted to be this much faster, the reference need not race too."""

STALLED = 1.3
"""A step that takes so many times as long with its loader as without waits for data."""

FEWEST_RIVALS, FEWEST_ROUNDS = 2, 2
"""Rivals are given up until so many rounds are affordable, but for the most promising."""


class Explorer:
    """Explores the space, phase by phase; what it has found is there whenever it is stopped.

    Args:
        launcher: What runs configs.
        fits: What is known of memory.
        plan: What can be afforded.
        reference: The config that the verdict compares with.
        reference_seconds: Its seconds per sample, end to end.

    Attributes:
        standings: How those came out who raced, the best first.
        guess: The config predicted to be best, while none has raced.
    """

    def __init__(
        self,
        launcher: Launcher,
        fits: Fits,
        *,
        plan: Plan,
        reference: Config,
        reference_seconds: float,
    ) -> None:
        self.launcher = launcher
        self.fits = fits
        self.plan = plan
        self.reference = reference
        self.reference_seconds = reference_seconds
        self.guard = Guard(launcher, reference)
        self.speeds = Speeds(launcher, fits, plan=plan, reference=reference)
        self.loading = Loading(seconds={})
        self.standings: list[Standing] = []
        self.guess: Config | None = None

    def run(self) -> None:
        """Run phases A to E, as far as the plan affords them.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        ladders = self._memory()
        if self.plan.is_tight:
            return
        if self._stalls():
            self._aim()
            self._load()
        self._find(ladders)
        if self._leads() and self.plan.has_verdict and self.plan.has_refused:
            self.plan.release_verdict()  # nothing to confirm: its time is better spent on searching
            self._find(ladders)

    def _leads(self) -> bool:
        """Whether nothing was found that would be better than the reference."""
        best = self.standings[0].config if self.standings else self.guess
        return best in {None, self.reference}

    def _find(self, ladders: list[list[Config]]) -> None:
        """Time sizes, drain the loader, and race the best, as far as the plan affords it."""
        self.speeds.sweep(ladders)
        self._switches()
        self._aim()
        if self.plan.runs("D") and not self.loading.seconds:
            self._load()
        self._aim()
        if self.guess != self.reference and not self.plan.has_verdict:
            self.plan.restore_verdict()
        if self.plan.runs("E"):
            self._race()
        if not self.standings and not self.plan.has_verdict:
            self._try_guess()

    @property
    def known(self) -> Knowledge:
        """What was found out so far."""
        return Knowledge(
            task=self.launcher.task,
            fits=self.fits,
            speeds=self.speeds,
            loading=self.loading,
            guard=self.guard,
            reference=self.reference,
        )

    def race(self, configs: list[Config], *, rules: Rules) -> list[Standing]:
        """Return how configs came out of a race, the best first."""
        race = Race(self.launcher, self.plan, rules=rules)
        found = race.run(configs, may_run=self.known.may_race)
        return in_order(found, goal=self.launcher.task.goal, fits=self.fits)

    def admits(self, config: Config, *, phase: str) -> bool:
        """Whether a config may race: it fits, and its gradients agree; by launches if need be."""
        if not self.known.may_race(config):
            return False
        cost = self.plan.cost(config, "check", cycles=CHECK_CYCLES)
        is_known = self.guard.knows(config) and self.fits.state(config) == "fits"
        if not is_known and not self.plan.affords(cost, phase="E"):
            return False
        return self.guard.admits(config, phase=phase) and self.fits.probe(config, phase=phase)

    def _memory(self) -> list[list[Config]]:
        """Return the configs that fit in each cell, by ascending batch size."""
        self._try_another_split()
        ladders: list[list[Config]] = []
        start = self.reference
        for cell in cells(self.launcher, self.reference):
            at = replace(start, amp=cell.amp)
            ladder = find_sizes(self.launcher, self.fits, self.plan, cell=at)
            ladders.append([config for config in ladder if self.guard.allows(config)])
            if ladder:
                start = ladder[-1]
        return ladders

    def _try_another_split(self) -> None:
        """Check another split at once where BatchNorm sees the batch: most likely it disagrees."""
        task = self.launcher.task
        is_kept = task.space.global_batch is not None
        if not (task.workload.has_batch_norm and is_kept) or self.plan.is_tight:
            return
        smaller = [s for s in task.space.splits() if s[0] < self.reference.batch_size]
        if smaller:
            self.admits(task.with_split(self.reference, smaller[-1]), phase="A")

    def _stalls(self) -> bool:
        """Whether the reference waits for its loader so much that this is to be seen to first."""
        seconds = self.speeds.measure(self.reference)
        return seconds is not None and self.reference_seconds > STALLED * seconds

    def _switches(self) -> None:
        """Time what else changes the step, at the best size: threads, and cuDNN's search."""
        ranked = self.speeds.ranked()
        if not ranked:
            return
        best = self._best_threads(ranked[0])
        for is_on in self.launcher.task.space.choices("cudnn_benchmark"):
            if is_on != best.cudnn_benchmark:
                self.speeds.measure(replace(best, cudnn_benchmark=bool(is_on)), phase="B")

    def _best_threads(self, best: Config) -> Config:
        """Return a size with the fastest number of threads, from the default down while it pays."""
        choices = [n for n in self.launcher.task.space.choices("threads") if n != best.threads]
        counts = [n for n in choices if n is None or isinstance(n, int)]
        usual = self.launcher.task.device.threads
        for threads in sorted(counts, key=lambda n: abs((n or usual) - usual)):
            other = replace(best, threads=threads)
            seconds = self.speeds.measure(other, phase="B")
            if seconds is None or seconds > self.speeds.of(best):
                break
            best = other
        return best

    def _aim(self) -> None:
        """Plan with the config that is predicted to be best."""
        allowed = [size for size in self.speeds.ranked() if self.guard.allows(size)]
        if allowed:
            self.guess = best_workers(self.known, allowed[0])
            self.plan.pick = self.guess

    def _load(self) -> None:
        """Drain the loader: at the best size, or at the reference's where that is smaller."""
        if self.guess is None or len(self.launcher.task.space.choices("num_workers")) <= 1:
            return
        is_smaller = self.reference.batch_size < self.guess.batch_size
        self.loading = drain(
            self.launcher,
            self.plan,
            at=self.reference if is_smaller else self.guess,
            compute_seconds=self.speeds.of(self.guess),
        )

    def _weigh(self) -> None:
        """Measure the peaks of all sizes that are fast enough, where memory is the aim."""
        for size in fast_enough(self.known):
            cost = self.plan.cost(size, "memory", cycles=MEMORY_CYCLES)
            if self.plan.affords(cost, phase="A"):
                self.fits.weigh(size)

    def _race(self) -> None:
        if self.launcher.task.goal == "memory":
            self._weigh()
        admitted = list(self._admitted())
        if not admitted:
            return
        best = min(self.known.predicted(config) for config in admitted)
        if self.reference_seconds < CLEARLY_FASTER * best or self.launcher.task.goal == "memory":
            admitted.insert(1, self.reference)
        while len(admitted) > FEWEST_RIVALS and not self._affords_rounds(admitted):
            admitted.pop()
        self.standings = self.race(admitted, rules=Rules.of(self.launcher.task.goal, phase="E"))
        if self.standings:
            self.plan.pick = self.standings[0].config

    def _try_guess(self) -> None:
        """Time the best guess end to end, where neither race nor verdict will."""
        if self.guess is None or self.guess == self.reference:
            return
        if self.admits(self.guess, phase="A"):
            rules = Rules.of(self.launcher.task.goal, phase="E", most_rounds=1)
            self.standings = self.race([self.guess], rules=rules)

    def _affords_rounds(self, configs: list[Config]) -> bool:
        seconds = sum(self.plan.cost(config, "train") for config in configs)
        launches = FEWEST_ROUNDS * len(configs)
        return self.plan.affords(FEWEST_ROUNDS * seconds, phase="E", launches=launches)

    def _admitted(self) -> Iterator[Config]:
        """Yield rivals that pass the numerics guard, looking anew after each that does not."""
        tried: set[Config] = set()
        while waiting := [config for config in rivals(self.known) if config not in tried]:
            tried.add(waiting[0])
            if self.admits(waiting[0], phase="E"):
                yield waiting[0]
