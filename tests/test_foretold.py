"""The table of predicted peaks, and the question that it answers."""

import json
from dataclasses import replace

import pytest
from simulations import MIB, estimate

from autotune.memory.forecast import Cell
from autotune.memory.foretold import Forecast, Question, cells_of
from autotune.space import Config

PLAIN, FULL = Cell(), Cell(checkpointing="full")
TABLE = Forecast(
    peaks={PLAIN: {4: estimate(100 * MIB), 8: estimate(200 * MIB)}},
    untraced={FULL: "of this"},
    seconds=1.5,
)


def question(limit_bytes: int, *, saves_memory: bool = False) -> Question:
    """What is asked under a limit."""
    cells = ((PLAIN, (4, 8)), (FULL, (4, 8)))
    return Question(
        cells=cells, limit_bytes=limit_bytes, seconds=1.0, is_memory_the_aim=saves_memory
    )


def test_a_config_is_looked_up_by_cell_and_size() -> None:
    """Of what is not in the table nothing is known."""
    config = Config(batch_size=8, num_workers=3)

    assert TABLE.predict(config) == estimate(200 * MIB)
    assert TABLE.predict(replace(config, batch_size=16)) is None
    assert TABLE.predict(replace(config, accumulation_steps=2)) is None
    assert TABLE.predict(replace(config, checkpointing="full")) is None


def test_a_table_is_json() -> None:
    """It is sent by a launch and kept in a journal."""
    assert Forecast.from_dict(json.loads(json.dumps(TABLE.to_dict()))) == TABLE


def test_configs_make_cells() -> None:
    """Each once, in order, with its batch sizes ascending; workers change no memory."""
    configs = [
        Config(batch_size=8),
        Config(batch_size=4, accumulation_steps=2),
        Config(batch_size=4),
        Config(batch_size=4, num_workers=1),
    ]

    assert cells_of(configs) == ((PLAIN, (4, 8)), (Cell(is_accumulated=True), (4,)))


@pytest.mark.parametrize(
    ("limit_mib", "saves_memory", "is_needed"),
    [(1000, False, False), (205, False, True), (150, False, True), (1000, True, True)],
)
def test_recomputing_is_asked_for_where_memory_binds(
    limit_mib: int, saves_memory: bool, is_needed: bool
) -> None:
    """Where all sizes fit, margin included, it only takes time; unless memory is the aim."""
    asked = question(limit_mib * MIB, saves_memory=saves_memory)

    assert asked.is_needed(PLAIN, {})
    assert asked.is_needed(FULL, TABLE.peaks) == is_needed


@pytest.mark.parametrize(
    ("kind", "largest", "is_needed"),
    [
        ("selective", {"off": 4, "full": 8}, True),
        ("selective", {"off": 4, "full": 4}, False),
        ("alternate", {"off": 4, "selective": 4, "full": 8}, True),
        ("alternate", {"off": 4, "selective": 8, "full": 8}, False),
    ],
)
def test_less_is_asked_for_where_more_fits_and_still_less_does_not(
    kind: str, largest: dict[str, int], *, is_needed: bool
) -> None:
    """What recomputes most fits a batch that no cheaper kind was predicted to."""
    peaks = {
        Cell(checkpointing=other): {
            size: estimate((100 if size <= fitting else 900) * MIB) for size in (4, 8)
        }
        for other, fitting in largest.items()
    }

    assert question(500 * MIB).is_needed(Cell(checkpointing=kind), peaks) == is_needed


def test_recomputing_is_asked_for_where_nothing_is_known() -> None:
    """Of another precision, say, or where the step without it cannot be traced."""
    other = {Cell(amp="bf16"): {4: estimate(MIB)}}

    assert question(1000 * MIB).is_needed(FULL, {})
    assert question(1000 * MIB).is_needed(FULL, other)
