"""What is tried: the values of each knob, and why others are not tuned."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulations import BLOCKS, cuda, device, workload

from autotune.baseline import resolve_baseline
from autotune.candidates import WORKER_BYTES, batch_sizes, build_space
from autotune.errors import OptionInvalid
from autotune.facts import DeviceFacts, WorkloadFacts
from autotune.space import Config, SearchSpace


def space_of(
    facts: WorkloadFacts | None = None,
    on: DeviceFacts | None = None,
    *,
    global_batch: Any = None,
    narrowed: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> SearchSpace:
    """Return the space of facts, resolved as a run would."""
    facts, on = facts or workload(), on or device()
    baseline, kept = resolve_baseline(facts, on, given=own, global_batch=global_batch)
    return build_space(facts, on, baseline=baseline, global_batch=kept, space=narrowed)


def test_a_cpu_is_tuned_in_batch_precision_workers_and_threads() -> None:
    """Of two cores: workers up to both, threads of one and, as the default, two."""
    space = space_of()

    assert space.splits() == ((1, 32), (2, 16), (4, 8), (8, 4), (16, 2), (32, 1))
    assert space.choices("amp") == ("off", "bf16")
    assert space.choices("num_workers") == (0, 1, 2)
    assert space.choices("threads") == (None, 1)
    assert {"pin_memory", "cudnn_benchmark"} <= space.left_out.keys()


def test_a_gpu_is_tuned_in_pinning_and_in_cudnn_where_there_are_convolutions() -> None:
    """Threads are left out; cuDNN is searched only for fixed shapes and convolutions."""
    fixed = space_of(workload(has_convolutions=True), cuda())
    varying = space_of(workload(has_convolutions=True, varies_in_shape=True), cuda())

    assert fixed.choices("pin_memory") == fixed.choices("cudnn_benchmark") == (False, True)
    assert fixed.choices("amp") == ("off", "bf16", "fp16")
    assert fixed.choices("threads") == (None,)
    assert varying.choices("cudnn_benchmark") == (False,)
    assert "vary in shape" in varying.left_out["cudnn_benchmark"]


def test_images_and_convolutions_are_what_another_layout_needs() -> None:
    """Where both are there it is a choice; elsewhere the report says what is missing."""
    image = {"has_convolutions": True, "has_image_batches": True}
    reasons = {
        "no convolutions": {"has_image_batches": True},
        "hold no images": {"has_convolutions": True},
        "five dimensions": {**image, "has_volumes": True},
        "last already": {**image, "is_channels_last": True},
    }

    assert space_of(workload(**image)).choices("channels_last") == (False, True)
    for reason, facts in reasons.items():
        space = space_of(workload(**facts))
        assert space.choices("channels_last") == (False,)
        assert reason in space.left_out["channels_last"]


def test_an_optimizer_steps_in_those_ways_that_it_knows() -> None:
    """Beside its own; one that knows no other is left out, by its name."""
    adamw = workload(optimizer_impls=("foreach", "fused"))
    lion = space_of(workload(optimizer="Lion"))
    own = space_of(adamw, own={"optimizer_impl": "fused"}, narrowed={"optimizer_impl": ["fused"]})

    assert space_of(adamw).choices("optimizer_impl") == ("default", "foreach", "fused")
    assert lion.choices("optimizer_impl") == ("default",)
    assert "Lion" in lion.left_out["optimizer_impl"]
    assert own.choices("optimizer_impl") == ("fused",)


def test_a_baseline_steps_as_its_optimizer_can() -> None:
    """What it does not know is refused, by the optimizer's name."""
    with pytest.raises(OptionInvalid, match="cannot be fused: NAdam"):
        space_of(
            workload(optimizer="NAdam", optimizer_impls=("foreach",)),
            own={"optimizer_impl": "fused"},
        )


def test_blocks_are_what_checkpointing_needs() -> None:
    """Where the model repeats some it is a choice; elsewhere the report says why it is none."""
    some, none = space_of(workload(blocks=BLOCKS)), space_of()

    assert some.choices("checkpointing") == ("off", "full")
    assert "checkpointing" not in some.left_out
    assert none.choices("checkpointing") == ("off",)
    assert "checkpoint_blocks" in none.left_out["checkpointing"]


@pytest.mark.parametrize(
    ("kinds", "own", "expected"),
    [
        (("selective", "alternate", "full"), "off", ("off", "selective", "alternate", "full")),
        (("full",), "alternate", ("off", "alternate", "full")),
    ],
)
def test_kinds_that_make_no_difference_are_left_out(
    kinds: tuple[str, ...], own: str, expected: tuple[str, ...]
) -> None:
    """And are refused; but what the user has today is always there."""
    facts = workload(blocks=BLOCKS, checkpointing=kinds)

    assert space_of(facts, own={"checkpointing": own}).choices("checkpointing") == expected
    with pytest.raises(OptionInvalid, match="cannot be selective_matmul here"):
        space_of(facts, narrowed={"checkpointing": ["selective_matmul"]})


def test_a_setting_that_the_loader_does_not_accept_is_left_out() -> None:
    """Each has its reason, and the batch size too is then the baseline's."""
    space = space_of(workload(loader_settings=()), cuda())

    assert space.choices("num_workers") == (0,)
    assert space.splits() == ((32, 1),)
    for knob in ("batch_size", "num_workers", "prefetch_factor", "pin_memory"):
        assert space.left_out[knob]


def test_every_knob_of_one_value_has_its_reason() -> None:
    """A knob is in the search or has a line in the report."""
    space = space_of(workload(loader_settings=("batch_size",)), device(native_precisions=("off",)))

    single = {knob for knob, values in space.values.items() if len(values) == 1}

    assert single == set(space.left_out)


def test_batchnorm_never_meets_a_batch_of_one() -> None:
    """No batch of one, and no size that leaves one at the end of an epoch."""
    facts = workload(has_batch_norm=True, drops_last=False, dataset_length=33)

    sizes = space_of(facts).choices("batch_size")

    assert sizes == (32,)  # 33 % 2, 4, 8, 16 and 32 are 1; 32 is the user's own
    assert 16 in space_of(workload(has_batch_norm=True)).choices("batch_size")


@pytest.mark.parametrize(
    ("narrowed", "knob", "expected"),
    [
        ({"amp": "bf16"}, "amp", ("bf16",)),
        ({"checkpointing": ["full", "off"]}, "checkpointing", ("off", "full")),
        ({"batch_size": ["16", 8]}, "batch_size", (8, 16)),
        ({"persistent_workers": ["off"]}, "persistent_workers", (False,)),
        ({"num_workers": [2, 0]}, "num_workers", (0, 2)),
        ({"threads": ["default"]}, "threads", (None,)),
        ({"prefetch_factor": [16]}, "prefetch_factor", (16,)),
    ],
)
def test_the_user_narrows_a_knob(
    narrowed: dict[str, Any], knob: str, expected: tuple[Any, ...]
) -> None:
    """Values come as text, numbers or switches, and are tried in ascending order."""
    space = space_of(workload(blocks=BLOCKS), narrowed=narrowed)

    assert space.choices(knob) == expected
    assert ("fixed by the user" in space.left_out.get(knob, "")) == (len(expected) == 1)


@pytest.mark.parametrize(
    "narrowed",
    [
        {"amp": ["fp16"]},
        {"amp": ["half"]},
        {"checkpointing": ["full"]},
        {"batch_size": [3000]},
        {"batch_size": [24]},
        {"num_workers": [3]},
        {"num_workers": [-1]},
        {"pin_memory": [True]},
        {"pin_memory": ["perhaps"]},
        {"channels_last": [True]},
        {"optimizer_impl": ["fused"]},
        {"threads": [8]},
        {"accumulation_steps": [3]},
        {"workers": [1]},
        {"num_workers": []},
    ],
)
def test_what_cannot_be_is_refused(narrowed: dict[str, Any]) -> None:
    """A value that is impossible here is an error, with what is possible as its hint."""
    with pytest.raises(OptionInvalid):
        space_of(narrowed=narrowed)


@given(
    global_batch=st.integers(1, 512) | st.just("free"),
    length=st.none() | st.integers(1, 5000),
    has_norm=st.booleans(),
)
def test_every_candidate_keeps_the_global_batch(
    global_batch: Any, length: int | None, has_norm: bool
) -> None:
    """Whatever is kept, the splits keep it, none is beyond the data, and the baseline is one."""
    facts = workload(stated_batch_size=None, dataset_length=length, has_batch_norm=has_norm)
    baseline, kept = resolve_baseline(facts, device(), given=None, global_batch=global_batch)

    space = build_space(facts, device(), baseline=baseline, global_batch=kept)

    assert (baseline.batch_size, baseline.accumulation_steps) in space.splits()
    assert kept is None or all(size * steps == kept for size, steps in space.splits())
    assert length is None or all(size <= length for size, _ in space.splits())


@given(target=st.integers(1, 2000), most=st.none() | st.integers(1, 2000))
def test_sizes_of_a_fixed_global_batch_are_its_divisors(target: int, most: int | None) -> None:
    """All of them, within the data set."""
    found = batch_sizes(global_batch=target, effective_batch=1, most=most)

    expected = [n for n in range(1, target + 1) if target % n == 0 and (most is None or n <= most)]
    assert found == expected


@given(effective=st.integers(1, 600), most=st.integers(1, 3000))
def test_sizes_of_a_free_global_batch_reach_to_the_data_set(effective: int, most: int) -> None:
    """Ascending, within the data set, and the data set itself among them."""
    found = batch_sizes(global_batch=None, effective_batch=effective, most=most)

    assert found == sorted(set(found))
    assert found[-1] <= most
    assert most in found or most < effective


def test_workers_stay_within_the_hosts_memory() -> None:
    """A machine with a little memory left has fewer of them than it has cores."""
    little = device(usable_cores=8, threads=8, host_bytes=3 * WORKER_BYTES + 1)

    assert space_of(workload(), little).choices("num_workers") == (0, 1, 2, 3)


def test_queues_stay_within_shared_memory() -> None:
    """In a container's 64 MiB there is room for 17 batches of 3 MiB, and for none of 60 MiB."""
    images = workload(sample_bytes=3 * 2**20 // 32)
    space = space_of(images, device(usable_cores=8, threads=8, shared_bytes=64 * 2**20))
    within, beyond = (Config(batch_size=32).with_workers(count) for count in (8, 9))

    assert space.has_room(within)
    assert not space.has_room(beyond)
    assert not space.has_room(Config(batch_size=640).with_workers(1))
