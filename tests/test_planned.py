"""Plans in words and as JSON."""

import json
from dataclasses import replace

import pytest

from autotune.memory.forecast import CPU_MARGIN, HIDDEN_MARGIN, Cell, Estimate
from autotune.memory.trace import Category, Instant, Phase
from autotune.output.planned import Plan, PlannedCell, PlannedSize

GIB = 2**30


def estimate(
    phase: Phase = Phase.BACKWARD, *, margin: float = CPU_MARGIN, **parts: int
) -> Estimate:
    """Return an estimate whose parts are these, in bytes."""
    by_category = dict.fromkeys(Category, 0) | {Category(name): parts[name] for name in parts}
    peak = sum(by_category.values())
    instant = Instant(
        peak_bytes=peak, phase=phase, by_category=by_category, by_owner={"layer": peak}
    )
    return Estimate(peak_bytes=peak, margin=margin, instant=instant, is_traced=True)


RISING = estimate(activations=9 * GIB, parameters=GIB)
PLAIN = PlannedCell(cell=Cell(), batch_size=8, estimate=RISING)
RECOMPUTED = PlannedCell(
    cell=Cell(amp="bf16", checkpointing="full"), batch_size=40, estimate=RISING
)


def size_of(*cells: PlannedCell) -> PlannedSize:
    """Return a memory of 11 GiB with these cells."""
    return PlannedSize(limit_bytes=11 * GIB, cells=cells)


def test_cells_are_named_as_configs_are() -> None:
    """The same words as everywhere."""
    assert (PLAIN.name, RECOMPUTED.name) == ("fp32", "bf16, checkpointed")


def test_words_name_batch_peak_margin_and_parts() -> None:
    """A line for each cell, below its size."""
    words = Plan(device_kind="cpu", sizes=(size_of(PLAIN, RECOMPUTED),)).words()

    assert "11.0 GiB" in words
    assert "batch 40" in words
    assert "10.0 GiB + 5%" in words
    assert "peak in backward: activations 90%, parameters 10%" in words


def test_advice_says_what_fits_more() -> None:
    """And what the largest batch is held back by."""
    advice = size_of(PLAIN, RECOMPUTED).advice()

    assert advice[0] == "bf16, checkpointed takes 5.0 times the batch of fp32"
    assert "goes to activations: checkpointing" in advice[1]


def test_an_optimizers_peak_is_named_as_such() -> None:
    """A smaller batch would not need less."""
    bound = estimate(Phase.OPTIMIZER, optimizer_state=6 * GIB, parameters=3 * GIB, temporaries=GIB)
    advice = size_of(replace(PLAIN, estimate=bound)).advice()

    assert "the optimizer's step, whatever the batch size: fused=True" in advice[0]
    assert "optimizer with less state" in advice[1]


def test_what_does_not_fit_tells_its_need() -> None:
    """Of a single sample; the advice is for the cell that needs least."""
    none = replace(PLAIN, batch_size=0)
    plan = Plan(device_kind="cpu", sizes=(size_of(none),))

    assert "does not fit" in plan.words()
    assert "1 sample needs 10.0 GiB" in plan.words()
    assert plan.sizes[0].best is None


def test_a_cell_that_fits_alone_is_said_so() -> None:
    """The user's own may not fit at all."""
    advice = size_of(replace(PLAIN, batch_size=0), RECOMPUTED).advice()

    assert advice[0] == "bf16, checkpointed fits, fp32 does not"


def test_the_whole_data_set_needs_no_advice() -> None:
    """There is nothing more to fit."""
    whole = replace(PLAIN, is_whole_data=True)

    assert size_of(whole).advice() == ()
    assert "all data" in Plan(device_kind="cpu", sizes=(size_of(whole),)).words()


def test_a_reason_stands_where_nothing_is_known() -> None:
    """The other cells are told all the same."""
    unknown = PlannedCell(cell=Cell(amp="bf16"), reason="the step reads values")
    words = str(Plan(device_kind="cpu", sizes=(size_of(PLAIN, unknown),)))

    assert "not known: the step reads values" in words
    assert size_of(unknown).advice() == ()


@pytest.mark.parametrize(
    ("kind", "margin", "text"),
    [("cuda", 0.2, "approximate"), ("cpu", HIDDEN_MARGIN, "Recurrent layers have a workspace")],
)
def test_a_wide_margin_is_explained(kind: str, margin: float, text: str) -> None:
    """A reader learns why."""
    wide = replace(PLAIN, estimate=replace(RISING, margin=margin))

    assert text in Plan(device_kind=kind, sizes=(size_of(wide),)).words()


def test_json_holds_every_figure() -> None:
    """In bytes, with the parts that add up to those of tensors."""
    plan = Plan(device_kind="cpu", sizes=(size_of(PLAIN, replace(PLAIN, batch_size=0)),))
    document = json.loads(json.dumps(plan.to_dict()))
    first, second = document["sizes"][0]["cells"]

    assert first["batch_size"] == 8
    assert second["batch_size"] is None
    assert sum(first["predicted"]["by_category"].values()) == first["predicted"]["tensor_bytes"]
    assert document["is_approximate"] is False


def test_small_parts_are_not_shown() -> None:
    """One percent is no word's worth."""
    odd = estimate(activations=99 * GIB, inputs=GIB)
    words = Plan(device_kind="cpu", sizes=(size_of(replace(PLAIN, estimate=odd)),)).words()

    assert "activations 99%" in words
    assert "inputs" not in words
