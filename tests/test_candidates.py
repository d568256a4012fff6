"""What is tried: the baseline that is resolved, and the values of each knob."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulations import cuda, device, workload

from autotune.candidates import build_space, resolve_baseline
from autotune.errors import OptionInvalid
from autotune.space import Config, SearchSpace


def space_of(facts=None, on=None, *, global_batch=None, narrowed=None, given=None) -> SearchSpace:
    """Return the space of facts, resolved as a run would."""
    facts, on = facts or workload(), on or device()
    baseline, kept = resolve_baseline(facts, on, given=given, global_batch=global_batch)
    return build_space(facts, on, baseline=baseline, global_batch=kept, space=narrowed)
