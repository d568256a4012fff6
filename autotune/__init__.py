"""autotune finds the fastest training configuration of a PyTorch model that fits in memory."""

import random
from importlib import import_module
from typing import TYPE_CHECKING

from autotune.version import __version__

if TYPE_CHECKING:
    from autotune.ahead import plan
    from autotune.errors import AutotuneError
    from autotune.outcome import Measurement, Trial
    from autotune.output.config_file import load
    from autotune.result import Result
    from autotune.space import Config
    from autotune.step.apply import apply
    from autotune.tune import fit
    from autotune.verdict import Estimate

_HOME = {
    "AutotuneError": "errors",
    "Config": "space",
    "Estimate": "verdict",
    "Measurement": "outcome",
    "Result": "result",
    "Trial": "outcome",
    "apply": "step.apply",
    "fit": "tune",
    "load": "output.config_file",
    "plan": "ahead",
}

__all__ = [
    "AutotuneError",
    "Config",
    "Estimate",
    "Measurement",
    "Result",
    "Trial",
    "__version__",
    "apply",
    "fit",
    "load",
    "plan",
]


def __getattr__(name: str) -> object:
    """Load a promised name when it is first used, so that `--help` never loads torch (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    drawn = random.getstate()
    try:
        return getattr(import_module(f"autotune.{_HOME[name]}"), name)
    finally:
        random.setstate(drawn)  # rich draws a number when it is loaded


def __dir__() -> list[str]:
    """Return the promised names."""
    return __all__
