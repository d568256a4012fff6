"""What the user has today: given, stated, or PyTorch's default."""

from typing import Any

import pytest
from simulations import device, workload

from autotune.baseline import resolve_baseline
from autotune.errors import OptionInvalid
from autotune.space import Config


@pytest.mark.parametrize(
    ("own", "stated", "length", "global_batch", "expected"),
    [
        ({"batch_size": 24}, 16, 1000, None, (24, 1, 24)),
        (None, 16, 1000, None, (16, 1, 16)),
        (None, None, 1000, None, (32, 1, None)),
        (None, None, 20, None, (16, 1, None)),
        (None, None, None, "free", (32, 1, None)),
        (None, 16, 1000, "free", (16, 1, None)),
        (None, 32, 1000, 48, (24, 2, 48)),
        (None, None, 1000, 100, (25, 4, 100)),
        ({"accumulation_steps": 4}, None, 1000, 64, (16, 4, 64)),
        (None, 64, 20, None, (20, 1, 20)),
    ],
)
def test_the_batch_size_is_the_first_that_exists(
    own: dict[str, int] | None,
    stated: int | None,
    length: int | None,
    global_batch: Any,
    expected: tuple[int, int, int | None],
) -> None:
    """Given, stated, then a power of two up to 32; a global batch takes a divisor of it."""
    facts = workload(stated_batch_size=stated, dataset_length=length)

    config, kept = resolve_baseline(facts, device(), given=own, global_batch=global_batch)

    assert (config.batch_size, config.accumulation_steps, kept) == expected


def test_what_is_left_open_is_the_default_of_pytorch() -> None:
    """Eager fp32, no workers; two batches ahead where workers were asked for."""
    bare, _ = resolve_baseline(workload(), device(), given=None, global_batch=None)
    fed, _ = resolve_baseline(workload(), device(), given={"num_workers": "2"}, global_batch=None)

    assert bare == Config(batch_size=32)
    assert fed == Config(batch_size=32, num_workers=2, prefetch_factor=2)


@pytest.mark.parametrize(
    ("own", "global_batch"),
    [
        ({"batch_size": 24}, 64),
        ({"batch_size": 16, "accumulation_steps": 2}, 64),
        ({"batch_size": 64}, 32),
        ({"amp": "fp16"}, None),
        ({"checkpointing": "full"}, None),
        ({"batch": 16}, None),
        ({"batch_size": 0}, None),
        ({"batch_size": "²"}, None),
        ({"accumulation_steps": "two"}, 64),
        (None, "huge"),
        (None, 0),
    ],
)
def test_contradictions_are_refused(own: dict[str, Any] | None, global_batch: Any) -> None:
    """A baseline that contradicts the global batch, the device or the knobs is an error."""
    with pytest.raises(OptionInvalid):
        resolve_baseline(workload(), device(), given=own, global_batch=global_batch)


def test_ranks_share_the_global_batch() -> None:
    """Batch size × accumulation × ranks is the global batch."""
    config, kept = resolve_baseline(workload(), device(), given=None, global_batch=96, world_size=2)

    assert (config.batch_size, config.accumulation_steps, kept) == (24, 2, 96)
    with pytest.raises(OptionInvalid, match="multiple of the number of ranks"):
        resolve_baseline(workload(), device(), given=None, global_batch=97, world_size=2)
