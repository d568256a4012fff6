"""The budget: how long a run may take, and how many launches it may make.

The one clock of a search: strategies ask the budget and never read a clock themselves, so a
simulated clock simulates the whole search.
"""

import math
import time
from collections.abc import Callable

from autotune.errors import NothingVerified

Clock = Callable[[], float]
"""Returns seconds that never go back."""


class BudgetSpent(NothingVerified):
    """Time or launches are used up; what has been verified by now is the answer."""


class Budget:
    """Time and launches that a run may use; time runs from when it is made.

    Args:
        time_seconds: How long the run may take; None for as long as it needs.
        trials: How many launches may run user code; None for any number.
        clock: What tells the time.

    >>> now = 0.0
    >>> budget = Budget(time_seconds=60.0, trials=2, clock=lambda: now)
    >>> now = 15.0
    >>> budget.remaining_seconds, budget.consumed, budget.is_done
    (45.0, 0.25, False)
    """

    def __init__(
        self,
        *,
        time_seconds: float | None = None,
        trials: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.time_seconds = math.inf if time_seconds is None else time_seconds
        self.trials = trials
        self.launches = 0
        self._clock = clock
        self._started = clock()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the budget was made."""
        return self._clock() - self._started

    @property
    def remaining_seconds(self) -> float:
        """Seconds that are left; never below zero, infinite without a limit."""
        return max(self.time_seconds - self.elapsed_seconds, 0.0)

    @property
    def remaining_launches(self) -> float:
        """Launches that are left; infinite without a limit."""
        return math.inf if self.trials is None else max(self.trials - self.launches, 0)

    @property
    def consumed(self) -> float:
        """The share that is used, 0 to 1: of the time or of the launches, whichever is more."""
        of_time = self.elapsed_seconds / self.time_seconds
        of_launches = self.launches / self.trials if self.trials else 0.0
        return min(max(of_time, of_launches), 1.0)

    @property
    def is_done(self) -> bool:
        """Whether nothing more may be launched."""
        return self.remaining_seconds <= 0 or self.remaining_launches < 1

    def count_launch(self) -> None:
        """Count a launch that runs user code.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        if self.is_done:
            raise BudgetSpent(
                "time or launches ran out before a configuration was verified",
                hint="give a larger time_budget, or more trials",
            )
        self.launches += 1

    def give_back_launch(self) -> None:
        """Take back what was counted for a launch that an earlier run had made already."""
        self.launches -= 1
