"""Config, its rules, and the space of those that may be tried."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulations import Simulation, cuda
from strategies import configs

from autotune.errors import OptionInvalid
from autotune.knobs import knob_value, parse_value
from autotune.space import Config, SearchSpace, divisors, largest_power_of_two, powers_of_two


@given(config=configs())
def test_a_config_round_trips(config: Config) -> None:
    """What is written is what is read."""
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "broken",
    [
        {"batch_size": 0},
        {"batch_size": True},
        {"batch_size": "8"},
        {"accumulation_steps": 0},
        {"num_workers": -1},
        {"threads": 0},
        {"amp": "fp8"},
        {"pin_memory": "on"},
        {"channels_last": 1},
        {"optimizer_impl": None},
        {"optimizer_impl": "for loop"},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
    ],
)
def test_a_config_refuses_to_be_built_wrong(broken: dict[str, object]) -> None:
    """The message names the rule and the value."""
    with pytest.raises(OptionInvalid, match="need"):
        Config.from_dict({"batch_size": 8} | broken)


@pytest.mark.parametrize(("document", "told"), [({}, "batch_size"), ({"size": 1}, "size")])
def test_a_document_must_hold_a_batch_size_and_knobs_alone(
    document: dict[str, int], told: str
) -> None:
    """Missing and unknown knobs are named."""
    with pytest.raises(OptionInvalid, match=told):
        Config.from_dict(document)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Config(batch_size=32), "batch 32, fp32"),
        (Config(batch_size=8, accumulation_steps=4, amp="bf16"), "batch 8 x 4, bf16"),
        (Config(batch_size=8).with_workers(1), "batch 8, fp32, 1 worker"),
        (
            Config(batch_size=8, pin_memory=True).with_workers(2, prefetch_factor=4),
            "batch 8, fp32, 2 workers, prefetch 4, pinned memory",
        ),
        (
            Config(batch_size=8, threads=3, cudnn_benchmark=True),
            "batch 8, fp32, 3 threads, cudnn.benchmark",
        ),
        (
            Config(batch_size=8, channels_last=True, optimizer_impl="fused"),
            "batch 8, fp32, channels last, fused optimizer",
        ),
        (Config(batch_size=8, optimizer_impl="foreach"), "batch 8, fp32, foreach optimizer"),
    ],
)
def test_a_config_is_described_without_what_is_default(config: Config, told: str) -> None:
    """In a few words, and only what differs from PyTorch's defaults."""
    assert config.describe() == told


def test_flags_leave_out_what_is_default() -> None:
    """What is off, and what PyTorch or the user's optimizer does by itself."""
    plain = Config(batch_size=8)
    varied = replace(plain, channels_last=True, optimizer_impl="fused")

    assert "optimizer" not in plain.flags()
    assert varied.flags() == f"{plain.flags()} --channels-last --optimizer-impl fused"


@pytest.mark.parametrize(
    ("knob", "value", "parsed"),
    [
        ("pin_memory", "off", False),
        ("pin_memory", True, True),
        ("batch_size", " 16 ", 16),
        ("threads", "default", None),
        ("optimizer_impl", "default", "default"),
        ("channels_last", "on", True),
        ("amp", False, "off"),
        ("amp", "bf16", "bf16"),
        ("num_workers", "many", "many"),
    ],
)
def test_values_are_read_as_people_write_them(knob: str, value: object, parsed: object) -> None:
    """What cannot be read stays as it is, for the config to refuse."""
    assert parse_value(knob, value) == parsed


@pytest.mark.parametrize(("knob", "value"), [("pin_memory", "yes"), ("pin_memory", 3), ("gpu", 1)])
def test_what_is_no_switch_and_no_knob_is_refused(knob: str, value: object) -> None:
    """A switch is on or off, and a knob has a known name."""
    with pytest.raises(OptionInvalid):
        parse_value(knob, value)


def test_a_free_batch_accumulates_only_up_to_the_baselines() -> None:
    """Smaller sizes are accumulated to its effective batch, larger ones are not."""
    space = SearchSpace(
        values={"batch_size": (8, 16, 24, 32, 48)}, global_batch=None, effective_batch=32
    )

    assert space.splits() == ((8, 4), (16, 2), (32, 1), (48, 1))


def test_ranks_share_the_batch() -> None:
    """Batch size × accumulation × ranks is the global batch; odd sizes are left out."""
    space = SearchSpace(
        values={"batch_size": (4, 8, 12, 16, 32)},
        global_batch=32,
        effective_batch=32,
        world_size=2,
    )

    assert space.splits() == ((4, 4), (8, 2), (16, 1))


def test_wanted_accumulation_narrows_the_splits() -> None:
    """Only those splits are left that accumulate so often."""
    space = SearchSpace(
        values={"batch_size": (4, 8, 16), "accumulation_steps": (2, 4)},
        global_batch=16,
        effective_batch=16,
    )

    assert space.splits() == ((4, 4), (8, 2))


def test_workers_come_as_the_space_allows() -> None:
    """Two batches ahead and living on, or as the user narrowed it; none without workers."""
    space = Simulation(device=cuda()).task.space
    narrow = replace(space, values={**space.values, "prefetch_factor": (8,)})
    bare = replace(space, values={"batch_size": (8,)})

    config = Config(batch_size=8)
    assert space.with_workers(config, 2) == config.with_workers(2)
    assert narrow.with_workers(config, 2) == config.with_workers(2, prefetch_factor=8)
    assert bare.with_workers(config, 2) == replace(config, num_workers=2)
    assert space.with_workers(config.with_workers(2), 0) == config


def test_a_space_knows_what_it_holds() -> None:
    """Every knob at one of its values, and the split one that is kept."""
    space = Simulation().task.space

    assert Config(batch_size=16, accumulation_steps=2) in space
    assert Config(batch_size=16).with_workers(2) not in space
    assert Config(batch_size=32, amp="fp16") not in space
    assert Config(batch_size=32).with_workers(1, prefetch_factor=3) not in space
    assert "batch 32" not in space
    assert space.choices("color") == ()


@given(most=st.integers(1, 10**6))
def test_the_largest_power_of_two_is_at_most_that(most: int) -> None:
    """And twice it is more."""
    power = largest_power_of_two(most)

    assert power <= most < 2 * power


@given(most=st.integers(1, 10**6))
def test_powers_of_two_double_up_to_the_largest(most: int) -> None:
    """From 1 on, each twice the one before."""
    powers = powers_of_two(most)

    assert powers[0] == 1
    assert powers[-1] == largest_power_of_two(most)
    assert powers[1:] == [2 * power for power in powers[:-1]]


@given(whole=st.integers(1, 2000))
def test_divisors_come_in_pairs(whole: int) -> None:
    """The smallest times the largest is the whole, and so on inwards."""
    found = divisors(whole)

    assert found[0] == 1
    assert [whole // size for size in reversed(found)] == found


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, "on"), (False, "off"), (None, "default"), (1, "1"), (0, "0"), ("bf16", "bf16")],
)
def test_a_value_is_said_as_it_is_given(value: bool | int | str | None, expected: str) -> None:
    """Numbers are no switches, and what is not set is the default."""
    assert knob_value(value) == expected
