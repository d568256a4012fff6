"""Configs near others: boxes, neighbours, the nearest of a space."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from simulations import BLOCKS, Simulation, cuda, workload

from autotune.search.proposals import (
    box_around,
    moves,
    neighbours,
    set_as,
    snapped,
    with_value,
    without_switches,
)
from autotune.space import Config

LEADER = Config(batch_size=8, accumulation_steps=4, amp="bf16").with_workers(2)
SPACE = Simulation(device=cuda()).task.space


def test_a_box_reaches_two_positions() -> None:
    """Ordered knobs are cut around the leader, switches are not."""
    box = box_around(SPACE, LEADER)

    assert box.choices("batch_size") == (2, 4, 8, 16, 32)
    assert box.choices("num_workers") == (0, 1, 2, 3, 4)
    assert box.choices("amp") == SPACE.choices("amp")


def test_neighbours_differ_in_one_knob() -> None:
    """All are in the space, and a split counts as one knob."""
    found = list(neighbours(SPACE, LEADER))

    assert len(found) == len(set(found))
    assert all(config in SPACE for config in found)
    loose = {"accumulation_steps", "prefetch_factor", "persistent_workers"}
    for config in found:
        changed = {k for k, v in config.to_dict().items() if v != LEADER.to_dict()[k]}
        assert len(changed - loose) <= 1


def test_there_is_nothing_to_prefetch_without_workers() -> None:
    """Only with workers is the prefetch factor a neighbour's knob."""
    alone = replace(LEADER, num_workers=0, prefetch_factor=None, persistent_workers=False)

    assert {c.prefetch_factor for c in neighbours(SPACE, alone) if not c.num_workers} == {None}
    assert {c.prefetch_factor for c in neighbours(SPACE, LEADER)} >= {2, 4}


def test_checkpointing_is_a_knob_of_its_own() -> None:
    """A neighbour away where the space has it, kept where it is proposed, and else left off."""
    blocks = Simulation(workload=workload(blocks=BLOCKS)).task.space
    full = replace(LEADER, checkpointing="full")

    assert full in list(neighbours(blocks, LEADER))
    assert full not in list(neighbours(SPACE, LEADER))
    assert snapped({"checkpointing": "full"}, blocks, leader=LEADER) == full
    assert snapped({"checkpointing": "full"}, SPACE, leader=LEADER) == LEADER


def test_a_value_brings_what_follows_from_it() -> None:
    """A batch size brings its accumulation, workers their settings."""
    assert with_value(SPACE, LEADER, knob="batch_size", value=16).accumulation_steps == 2
    assert with_value(SPACE, LEADER, knob="num_workers", value=0).prefetch_factor is None


@given(
    values=st.fixed_dictionaries(
        {
            "batch_size": st.integers(1, 64),
            "num_workers": st.integers(0, 9),
            "prefetch_factor": st.none() | st.integers(1, 9),
            "threads": st.none(),
            "amp": st.sampled_from(["off", "bf16", "fp16"]),
            "checkpointing": st.sampled_from(["off", "full"]),
            "pin_memory": st.booleans(),
        }
    )
)
def test_whatever_is_proposed_becomes_a_config_of_the_space(values: dict[str, Any]) -> None:
    """The nearest config that may be tried; one that may be is left as it is."""
    config = snapped(values, SPACE, leader=LEADER)

    assert config in SPACE
    assert snapped(config.to_dict(), SPACE, leader=LEADER) == config


def test_the_nearest_is_taken_on_a_logarithmic_scale() -> None:
    """Between 8 and 16, 12 is nearer to 16."""
    assert snapped({"batch_size": 12}, SPACE, leader=LEADER).batch_size == 16
    assert snapped({"batch_size": 11}, SPACE, leader=LEADER).batch_size == 8


def test_moves_are_the_knobs_that_differ() -> None:
    """What follows from another knob is none, nor is what a loader without workers would fetch."""
    other = replace(with_value(SPACE, LEADER, knob="batch_size", value=16), pin_memory=True)

    assert moves(SPACE, LEADER, other) == [("batch_size", 16), ("pin_memory", True)]
    assert moves(SPACE, LEADER, LEADER.with_workers(0)) == [("num_workers", 0)]


def test_switches_are_taken_over_and_put_back() -> None:
    """Threads and switches alone: the size and the loader stay."""
    model = Config(batch_size=1, cudnn_benchmark=True, optimizer_impl="fused")

    assert set_as(model, LEADER) == replace(LEADER, cudnn_benchmark=True, optimizer_impl="fused")
    assert without_switches(set_as(model, LEADER)) == LEADER
