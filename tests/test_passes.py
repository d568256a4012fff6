"""Tests of autotune/trial/passes.py: what a launch does for each purpose."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from workloads import quick_launches

from autotune.device.cpu import CpuDevice
from autotune.outcome import (
    Crashed,
    Invalid,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    Purpose,
    Request,
)
from autotune.space import Config
from autotune.trial import passes
from autotune.trial.launch import attempt
from autotune.workload import Workload, live_workload

PURPOSES: list[Purpose] = ["memory", "compute", "loader", "train", "verify"]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Samples that tell which they are."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.tensor(index % 2)


class Watched(nn.Module):
    """A model that remembers which samples it was given, and how."""

    def __init__(self, *, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.seen: list[list[int]] = []
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, value: Tensor) -> Tensor:
        """Return the layer's output."""
        self.seen.append([int(number) for number in value[:, 0]])
        self.modes.append((self.training, torch.is_grad_enabled()))
        result: Tensor = self.layer(value / 100)
        return result


def numbered(samples: int = 32, **settings: Any) -> Callable[..., Iterable[Any]]:
    """Return a factory of loaders of numbered samples."""

    def loader_fn(
        batch_size: int, num_workers: int = 0, *, persistent_workers: bool = False
    ) -> Iterable[Any]:
        return DataLoader(
            Numbered(samples),
            batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            **settings,
        )

    return loader_fn


def pairs(width: int) -> Callable[..., Iterable[Any]]:
    """Return a factory of loaders of a few batches, inputs and targets alike."""

    def loader_fn(batch_size: int) -> Iterable[Any]:
        return [(torch.zeros(batch_size, width),) * 2] * 4

    return loader_fn


def run(workload: Workload, purpose: Purpose, config: Config, **more: Any) -> Outcome:
    """Carry out a request here; return how it ended."""
    request = Request(purpose=purpose, config=config, **{"cycles": 3} | more)
    return attempt(workload, CpuDevice(), request).outcome


def measured(outcome: Outcome) -> Measurement:
    """Return the measurement of a launch that ran to its end."""
    assert isinstance(outcome, Measured), outcome
    return outcome.measurement


def peak_of(workload: Workload, config: Config, **more: Any) -> int:
    """Return the peak of a memory pass, in bytes."""
    peak = measured(run(workload, "memory", config, **more)).peak_bytes
    assert peak is not None
    return peak


def test_the_peak_holds_optimizer_state() -> None:
    """Two moments for each parameter are made in the first step, and are there in the next."""
    model = nn.Linear(200, 200, bias=False)
    loader_fn = pairs(200)
    plain = live_workload(model, loader_fn, optimizer_fn=torch.optim.SGD)

    peak = peak_of(live_workload(model, loader_fn), Config(batch_size=1))

    assert peak - peak_of(plain, Config(batch_size=1)) >= 2 * 200 * 200 * 4


class Hoarding(nn.Linear):
    """A model that keeps what it computes, or a cycle of references that lives for a while."""

    def __init__(self, keeps: str) -> None:
        super().__init__(8, 8)
        self.keeps, self.kept = keeps, list[Any]()

    def forward(self, value: Tensor) -> Tensor:
        """Return the layer's output."""
        result = super().forward(value)
        if self.keeps == "outputs":
            self.kept.append(result.detach().clone())
        elif self.keeps == "cycles":
            cycle: list[Any] = [result.detach().clone()]
            cycle.append(cycle)
        elif self.keeps == "the last":
            self.kept = [result.detach().clone()]
        return result


@pytest.mark.parametrize(
    ("keeps", "expected"), [("outputs", 2 * 8 * 4), ("cycles", 0), ("the last", 0), ("nothing", 0)]
)
def test_what_is_kept_from_step_to_step_is_growth(keeps: str, expected: int) -> None:
    """In bytes a step; what is only not yet collected is none (CASES.md row 57)."""
    workload = live_workload(Hoarding(keeps), pairs(8))

    found = measured(run(workload, "memory", Config(batch_size=2)))

    assert found.growth_bytes == (expected or None)


def test_a_size_whose_steps_need_retries_is_not_used() -> None:
    """Near the limit an allocator that makes room all the time is many times slower (row 108)."""
    with pytest.raises(passes.Unusable, match="7 times in 4 steps"):
        passes._refuse_thrashing(7, steps=4)
    passes._refuse_thrashing(0, steps=4)


def test_a_second_micro_batch_meets_gradients_and_a_third_adds_nothing() -> None:
    """So two stand for any number of them."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    workload = live_workload(model, pairs(300), optimizer_fn=torch.optim.SGD)

    peaks = [
        peak_of(workload, Config(batch_size=500, accumulation_steps=steps)) for steps in (1, 2, 3)
    ]

    assert peaks[0] < peaks[1] == peaks[2]


class Lengths(Dataset[Tensor]):
    """Samples of which the longest come last."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(index + 1, 8)


class Summed(nn.Module):
    """A model whose memory grows with the longest sample of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 64)

    def forward(self, value: Tensor) -> Tensor:
        """Return one number."""
        result: Tensor = self.layer(value).square().mean()
        return result


def padded(samples: list[Tensor]) -> Tensor:
    """Return samples as one tensor, as long as the longest."""
    return pad_sequence(samples, batch_first=True)


def lengths_fn(batch_size: int) -> Iterable[Any]:
    """Return a loader that pads."""
    return DataLoader(Lengths(), batch_size, collate_fn=padded)


def rows_of(*lengths: int) -> Callable[..., Iterable[Any]]:
    """Return a factory of loaders whose batches have these lengths, again and again."""

    def loader_fn(batch_size: int) -> Iterable[Any]:
        return [torch.ones(batch_size, length, 8) for length in lengths * 2]

    return loader_fn


@pytest.mark.parametrize("purpose", ["memory", "verify"])
def test_the_largest_samples_make_the_worst_batch(purpose: Purpose) -> None:
    """Where they are known; else the largest of a few batches stands for it."""
    workload = live_workload(Summed, lengths_fn)
    config = Config(batch_size=4)

    known = measured(run(workload, purpose, config, largest_samples=(39, 38))).peak_bytes
    unknown = measured(run(workload, purpose, config)).peak_bytes

    longest, fourth = (4 * length * 64 * 4 for length in (40, 16))  # bytes of activations
    assert known is not None
    assert unknown is not None
    assert known - unknown >= longest - fourth


@pytest.mark.parametrize("purpose", ["memory", "verify"])
def test_a_limit_is_kept_to_the_byte(purpose: Purpose) -> None:
    """What would go above it ends the launch, and is named."""
    workload = live_workload(Summed, lengths_fn)
    config = Config(batch_size=4)
    peak = measured(run(workload, purpose, config)).peak_bytes
    assert peak is not None

    within = run(workload, purpose, config, limit_bytes=peak)
    above = run(workload, purpose, config, limit_bytes=peak - 1)

    assert measured(within).limit_bytes == peak
    assert isinstance(above, OutOfMemory)
    assert f"live tensors need {peak} bytes" in above.reason
    assert "aten." in above.reason


def test_verifying_evaluates_after_each_step() -> None:
    """Two whole cycles on training batches, each followed by evaluation as it is written."""
    model = Watched()
    workload = live_workload(model, numbered(), eval_loader_fn=numbered(6))

    measured(run(workload, "verify", Config(batch_size=4, accumulation_steps=3)))

    assert model.modes == ([(True, True)] * 3 + [(False, False)]) * 2
    assert model.training


def test_an_evaluation_above_the_limit_is_found() -> None:
    """Here its batches are larger than those of training (CASES.md row 24)."""
    config = Config(batch_size=8)
    peak = peak_of(live_workload(Summed, rows_of(1)), config)

    def verify(**more: Any) -> Outcome:
        workload = live_workload(Summed, rows_of(1), **more)
        return run(workload, "verify", config, limit_bytes=peak)

    alone, both = verify(), verify(eval_loader_fn=rows_of(1, 50))

    assert isinstance(alone, Measured)
    assert isinstance(both, OutOfMemory)
    assert f"limit of {peak} bytes" in both.reason


def test_evaluation_uses_the_loss_that_was_written() -> None:
    """The model may take its batch in a way that only `loss_fn` knows."""
    modes: list[bool] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        modes.append(model.training)
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    def loader_fn(batch_size: int) -> Iterable[Any]:
        return [{"x": torch.zeros(batch_size, 4), "y": torch.zeros(batch_size).long()}]

    workload = live_workload(Watched, loader_fn, loss_fn=loss_fn, eval_loader_fn=loader_fn)

    measured(run(workload, "verify", Config(batch_size=4)))

    assert modes == [True, False] * 2


@pytest.mark.parametrize("purpose", ["memory", "compute", "train", "verify"])
@pytest.mark.parametrize("given", [2, 8])
def test_another_batch_size_is_invalid(purpose: Purpose, given: int) -> None:
    """A loader may ignore what it was asked for (CASES.md rows 21, 105)."""
    workload = live_workload(Watched, lambda batch_size: numbered()(given + 0 * batch_size))

    outcome = run(workload, purpose, Config(batch_size=4))

    assert outcome == Invalid(reason=f"the loader gave {given} samples, not 4")


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_data_set_smaller_than_the_batch_is_what_there_is(purpose: Purpose) -> None:
    """One batch is all of it, and only real samples count."""
    workload = live_workload(Watched, numbered(5))

    found = measured(run(workload, purpose, Config(batch_size=16)))

    assert found.samples_per_optimizer_step == 16
    if found.samples_per_second is not None:
        assert found.optimizer_step_seconds == pytest.approx(16 / found.samples_per_second)


@pytest.mark.parametrize("purpose", ["memory", "compute", "train", "verify"])
def test_a_loader_that_yields_nothing_is_the_workloads_fault(purpose: Purpose) -> None:
    """It was wrong before the first step."""
    workload = live_workload(Watched, numbered(3, drop_last=True))

    outcome = run(workload, purpose, Config(batch_size=4))

    assert isinstance(outcome, Crashed)
    assert outcome.is_workload_error
    assert "yields nothing" in outcome.reason


def test_draining_a_loader_that_yields_nothing_is_invalid() -> None:
    """Nothing was measured."""
    outcome = run(
        live_workload(Watched, numbered(3, drop_last=True)), "loader", Config(batch_size=4)
    )

    assert outcome == Invalid(reason="the loader gave no batch")


@pytest.mark.parametrize("purpose", ["compute", "train", "verify"])
def test_a_loss_that_is_not_finite_is_invalid(purpose: Purpose) -> None:
    """However fast it was computed."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(batch[0]).sum() * float("nan")
        return value

    outcome = run(
        live_workload(Watched, numbered(), loss_fn=loss_fn), purpose, Config(batch_size=4)
    )

    assert outcome == Invalid(reason="the loss is not finite")


@pytest.mark.parametrize("purpose", ["compute", "train"])
def test_a_scaler_that_skips_every_step_is_invalid(purpose: Purpose) -> None:
    """The loss is a number, the gradients are none at any scale: nothing is trained."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * 1e12

    config = Config(batch_size=4, amp="fp16")

    outcome = run(live_workload(Watched, numbered(), loss_fn=loss_fn), purpose, config)

    assert isinstance(outcome, Invalid)
    assert outcome.reason == "the scaler skipped 16 steps: gradients overflow at every scale"


@pytest.mark.parametrize("purpose", ["compute", "train"])
@pytest.mark.parametrize(("every", "is_right"), [(2, False), (7, True)])
def test_a_scaler_that_skips_many_steps_is_invalid(
    purpose: Purpose, every: int, *, is_right: bool
) -> None:
    """Steps without an optimizer are no measurement of training; a few of many are usual."""
    losses: list[float] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        losses.append(float("inf") if len(losses) % every == 1 else 1.0)
        scores = model(batch[0])
        scores.register_hook(lambda gradient: gradient * losses[-1])
        return functional.cross_entropy(scores, batch[1])

    config = Config(batch_size=4, amp="fp16")

    outcome = run(live_workload(Watched, numbered(), loss_fn=loss_fn), purpose, config, cycles=8)

    assert isinstance(outcome, Measured) == is_right
    assert is_right or "the scaler skipped 4 of 8 steps" in outcome.reason


def test_whole_cycles_are_timed_across_epochs() -> None:
    """A window to warm up, then so many; the loader starts again when an epoch ends."""
    model = Watched()

    found = measured(
        run(
            live_workload(model, numbered(6)),
            "train",
            Config(batch_size=2, accumulation_steps=2),
            cycles=3,
        )
    )

    assert model.seen == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert found.samples_per_optimizer_step == 4


def test_windows_are_skipped_without_a_step() -> None:
    """So that the queue is empty, and rivals see the same samples."""
    model = Watched()

    run(live_workload(model, numbered()), "train", Config(batch_size=4), cycles=2, skip_windows=3)

    assert [batch[0] for batch in model.seen] == [0, 12, 16]


@pytest.mark.parametrize("purpose", ["compute", "train"])
def test_rivals_see_the_same_samples(purpose: Purpose) -> None:
    """Of one seed, however they are cut; another seed gives another order."""

    def order_of(config: Config, seed: int) -> list[int]:
        model = Watched()
        run(live_workload(model, numbered(shuffle=True)), purpose, config, seed=seed, cycles=2)
        return [number for batch in model.seen for number in batch]

    whole = order_of(Config(batch_size=8), 1)

    assert whole == order_of(Config(batch_size=4, accumulation_steps=2), 1)
    assert whole != order_of(Config(batch_size=8), 2)


def test_compute_goes_round_the_batches_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which hold no more than their share of memory, but two at least."""
    monkeypatch.setattr(passes, "HELD_BYTES", 1)
    model = Watched()

    found = measured(
        run(live_workload(model, numbered()), "compute", Config(batch_size=4, accumulation_steps=2))
    )

    assert {batch[0] for batch in model.seen} == {0, 4}
    assert len(model.seen) == 8
    assert found.data_wait_share is not None
    assert found.data_wait_share < 0.5


def test_draining_runs_no_step() -> None:
    """The loader alone, so many batches as the cycles have."""
    model = Watched()
    request = Request(purpose="loader", config=Config(batch_size=4, accumulation_steps=2), cycles=3)

    report = attempt(live_workload(model, numbered()), CpuDevice(), request)

    assert model.seen == []
    assert report.launch is not None
    assert len(report.launch.step_seconds) == 6
    assert measured(report.outcome).data_wait_share == pytest.approx(1.0)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_end_with_the_launch(persistent: bool) -> None:
    """Also those that live on between epochs (CASES.md row 92)."""
    config = replace(Config(batch_size=4).with_workers(1), persistent_workers=persistent)

    measured(run(live_workload(Watched, numbered()), "train", config, cycles=1))

    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("workers", "steps", "skipped"), [(0, 1, 0), (1, 1, 2), (3, 1, 4), (3, 2, 2), (3, 9, 1)]
)
def test_with_workers_a_batch_more_than_they_are_is_skipped(
    workers: int, steps: int, skipped: int
) -> None:
    """Which they made while they started."""
    config = Config(batch_size=1, accumulation_steps=steps).with_workers(workers)
    bench = passes.Bench(
        workload=live_workload(Watched, numbered()),
        device=CpuDevice(),
        request=Request(purpose="train", config=config),
        stepper=None,  # type: ignore[arg-type]  # no step is made
        deadline=0.0,
    )

    assert passes._windows_to_skip(bench) == skipped


def test_a_launch_that_is_late_answers_with_what_it_has() -> None:
    """One cycle at least."""
    request = Request(
        purpose="train", config=Config(batch_size=4), cycles=5, time_limit_seconds=0.0
    )

    report = attempt(live_workload(Watched, numbered()), CpuDevice(), request)

    assert isinstance(report.outcome, Measured)
    assert report.launch is not None
    assert len(report.launch.step_seconds) == 1


def of_pairs(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss that tells each sample from all others of its batch."""
    found = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(found @ found.T, torch.arange(len(found)))


@pytest.mark.parametrize(
    ("config", "loss_fn", "agrees"),
    [
        (Config(batch_size=4, accumulation_steps=2), None, True),
        (Config(batch_size=4, accumulation_steps=2), of_pairs, False),
        (Config(batch_size=1, accumulation_steps=8), of_pairs, False),
        (Config(batch_size=8, amp="bf16"), of_pairs, True),
        (Config(batch_size=16), of_pairs, True),
    ],
)
def test_numerics_are_checked_against_the_baseline(
    config: Config, loss_fn: Any, agrees: bool
) -> None:
    """Also where the smaller of the two batches has one sample alone, which cannot be cut."""
    workload = live_workload(Watched, numbered(), loss_fn=loss_fn)

    outcome = run(workload, "check", config, baseline=Config(batch_size=8))

    assert isinstance(outcome, Measured if agrees else Invalid), outcome


def test_a_check_needs_a_baseline() -> None:
    """Else there is nothing to compare with."""
    outcome = run(live_workload(Watched, numbered()), "check", Config(batch_size=4))

    assert isinstance(outcome, Invalid)
    assert "needs a baseline" in outcome.reason


def test_a_config_sets_threads_and_checkpointing() -> None:
    """For the launch alone."""
    threads: list[int] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            threads.append(torch.get_num_threads())
            result: Tensor = self.layer(value)
            return result

    model = nn.Sequential(Block(), Block(), nn.Linear(4, 2))
    before = torch.get_num_threads()
    config = Config(batch_size=4, threads=2, checkpointing="full")

    measured(run(live_workload(model, numbered()), "train", config, cycles=1))

    assert threads == [2] * 2 * 4  # two blocks, two steps, each block run twice in each
    assert torch.get_num_threads() == before


class Seeing(nn.Module):
    """Convolutions that remember how their inputs and weights lay in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 3)
        self.orders: list[tuple[bool, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return scores."""
        seen = (images, self.layer.weight)
        last = [item.is_contiguous(memory_format=torch.channels_last) for item in seen]
        self.orders.append((last[0], last[1]))
        scores: Tensor = self.layer(images)
        return scores.mean((2, 3))


def pictures(batch_size: int) -> Iterable[Any]:
    """Return a few batches of images and classes."""
    return [(torch.rand(batch_size, 2, 5, 5), torch.arange(batch_size) % 3)] * 4


@pytest.mark.parametrize("purpose", ["memory", "compute", "train", "verify"])
@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("way", ["default", "foreach", "fused"])
def test_layout_and_optimizer_are_seen_by_the_users_code(
    purpose: Purpose, way: str, *, is_on: bool
) -> None:
    """In every forward pass and every step of a launch, and no longer."""
    model, made = Seeing(), list[torch.optim.Optimizer]()
    flags: list[tuple[bool | None, bool | None]] = []

    def optimizer_fn(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(parameters))
        made[-1].register_step_pre_hook(
            lambda stepped, *_: flags.extend(
                (group["foreach"], group["fused"]) for group in stepped.param_groups
            )
        )
        return made[-1]

    workload = live_workload(model, pictures, optimizer_fn=optimizer_fn)
    config = Config(batch_size=3, channels_last=is_on, optimizer_impl=way)

    measured(run(workload, purpose, config))

    expected = (None, None) if way == "default" else (way == "foreach", way == "fused")
    assert {*model.orders} == {(is_on, is_on)}
    assert {*flags} == {expected}
    assert (made[0].param_groups[0]["foreach"], made[0].param_groups[0]["fused"]) == (None, None)
    assert model.layer.weight.is_contiguous()


def test_a_check_sets_the_layout_for_what_it_compares() -> None:
    """Both layouts run in it, the weights with the images."""
    model = Seeing()
    baseline = Config(batch_size=3)
    config = Config(batch_size=3, channels_last=True, optimizer_impl="fused")

    measured(run(live_workload(model, pictures), "check", config, baseline=baseline))

    assert {*model.orders} == {(False, False), (True, True)}
    assert model.layer.weight.is_contiguous()


def test_foreach_takes_memory_of_its_own() -> None:
    """All parameters at once have temporaries: a peak without them is none with them."""
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(8)))
    workload = live_workload(model, pairs(100))

    peaks = {
        way: peak_of(workload, Config(batch_size=1, optimizer_impl=way))
        for way in ("default", "foreach")
    }

    assert peaks["foreach"] > peaks["default"] + 2 * 100 * 100 * 4
