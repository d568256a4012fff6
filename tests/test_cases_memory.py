"""The rows of CASES.md that are about memory, each by its number.

On a CPU the limit is real: the tracker raises where live tensors pass it. Where hardware is
missing, its figures are simulated, and the test says so.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from simulations import Simulation, device, workload
from test_cuda_fake import CONTEXT, MIB, OTHERS, TOTAL, FakeGpu
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from traces import trace_of
from workloads import quick_launches

from autotune.device.cpu import CpuDevice
from autotune.device.cuda import CudaDevice
from autotune.device.host import Host
from autotune.facts import DeviceFacts, Survey
from autotune.memory.forecast import CPU_MARGIN, Cell, CellForecast
from autotune.memory.law import MemoryLaw, Split
from autotune.memory.replay import fit_law, largest_batch_of
from autotune.memory.simulation import simulate, smallest_limit_bytes
from autotune.memory.trace import Category, Phase, Trace, peak_bytes, peak_of
from autotune.options import Options
from autotune.outcome import Invalid, Measured, Measurement, Outcome, OutOfMemory, Purpose, Request
from autotune.space import Config
from autotune.step import training
from autotune.step.batch import tensors_in
from autotune.tracing.batches import Pattern
from autotune.tracing.subject import Subject
from autotune.trial import passes
from autotune.trial.foresee import foresee
from autotune.trial.largest import find_largest
from autotune.trial.launch import attempt
from autotune.trial.measure import Cycle
from autotune.trial.pressure import CLIFF, SPILLED_BYTES, TAKEN_BYTES, Pressure, cliff
from autotune.workload import Workload, live_workload

Batches = Callable[..., Iterable[Any]]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


def run(workload: Workload, purpose: Purpose, config: Config, **more: Any) -> Outcome:
    """Carry out a request here; return how it ended."""
    request = Request(purpose=purpose, config=config, **{"cycles": 3} | more)
    return attempt(workload, CpuDevice(), request).outcome


def measured(outcome: Outcome) -> Measurement:
    """Return the measurement of a launch that ran to its end."""
    assert isinstance(outcome, Measured), outcome
    return outcome.measurement


def peak_in(workload: Workload, config: Config, **more: Any) -> int:
    """Return the peak of a memory pass."""
    peak = measured(run(workload, "memory", config, **more)).peak_bytes
    assert peak is not None
    return peak


class Squared(nn.Module):
    """A model whose activations grow with the length of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 64)

    def forward(self, value: Tensor) -> Tensor:
        """Return one number."""
        return torch.as_tensor(self.layer(value).square().mean())


def rows_of(*lengths: int) -> Batches:
    """Return a factory of loaders whose batches have these lengths, again and again."""
    return lambda batch_size: [torch.ones(batch_size, length, 8) for length in lengths * 2]


class Rows(Dataset[Tensor]):
    """Samples of these lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(self.lengths[index], 8)


ASCENDING = tuple(range(1, 41))
"""The longest comes last."""


def padded(lengths: Sequence[int]) -> Batches:
    """Return a factory of loaders that pad each batch to its longest sample."""
    collate: Any = partial(pad_sequence, batch_first=True)
    return lambda batch_size=4: DataLoader(Rows(lengths), batch_size, collate_fn=collate)


texts = padded(ASCENDING)


def test_row_014_a_flat_curve_is_not_extrapolated() -> None:
    """Two sizes of one peak, where a fixed cost dominates, say nothing of larger sizes."""
    law = MemoryLaw().with_peak(Split(batch_size=1), 500).with_peak(Split(batch_size=2), 500)

    assert not law.surely_fits(2**40, Split(batch_size=64))
    assert law.predict(Split(batch_size=64)).kind == "at_least"


def test_row_014_a_traced_plateau_is_followed_by_its_ramp() -> None:
    """The optimizer's step hides the ramp of activations at small sizes; the trace knows of it."""
    flat = {
        size: trace_of((100, 10 * size, 70), (0, 1, ~1, 2, ~2), batch_size=size) for size in (2, 3)
    }
    law = fit_law(flat[2], flat[3])

    assert law is not None
    assert peak_bytes(flat[2]) == peak_bytes(flat[3]) == 170
    assert largest_batch_of(law, 300) == 20


def test_row_015_what_was_there_before_is_no_part_of_a_peak() -> None:
    """Memory that this process holds for something else changes no figure of a launch."""
    workload, config = live_workload(Squared, rows_of(5)), Config(batch_size=4)
    alone = peak_in(workload, config)
    other = torch.zeros(4 * MIB)

    assert peak_in(workload, config) == alone < other.nbytes


def test_row_015_simulated_gpu_counts_from_an_empty_cache() -> None:
    """What a (simulated) allocator had reserved before is given back before a pass is watched."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu()
        gpu.install(patch)
        gpu.allocate(500 * MIB)
        gpu.allocated = 0
        with CudaDevice(0).watch([], limit_bytes=None) as meter:
            gpu.allocate(20 * MIB)

    assert meter.peak.reserved_bytes == 20 * MIB


def test_row_021_each_launch_has_a_loader_of_its_own_size() -> None:
    """And a loader that keeps an earlier size is caught by the batch that it really gave."""
    asked: list[int] = []

    def loader_fn(batch_size: int) -> Iterable[Any]:
        asked.append(batch_size)
        return rows_of(1)(asked[0])

    workload = live_workload(Squared, loader_fn)
    first = run(workload, "memory", Config(batch_size=4))
    second = run(workload, "memory", Config(batch_size=8))

    assert isinstance(first, Measured)
    assert second == Invalid(reason="the loader gave 4 samples, not 8")
    assert list(dict.fromkeys(asked)) == [4, 8]


@pytest.mark.parametrize("seed", range(3))
def test_rows_021_032_036_the_answer_was_run_within_the_limit(seed: int) -> None:
    """Whatever is predicted, what comes out was verified last, under the limit (simulated)."""
    simulation = Simulation(device=device(free_bytes=900 * MIB), seed=seed)
    decision = simulation.run()
    verified = [trial for trial in simulation.trials if trial.phase == "verify"]

    assert verified[-1].config == decision.config
    assert isinstance(verified[-1].outcome, Measured)
    assert verified[-1].peak_bytes is not None
    assert verified[-1].peak_bytes <= simulation.task.limit_bytes


@pytest.mark.parametrize(("kind", "share"), [("cpu", 0.85), ("cuda", 0.95)])
def test_row_022_a_default_limit_leaves_headroom(kind: str, share: float) -> None:
    """Below what is free, by more than a rounding; a limit that was given is kept to the byte."""
    survey = _survey(kind, free_bytes=10_000 * MIB)
    limit = Options().limit_bytes(survey)

    assert share * 10_000 * MIB * 0.9 < limit <= share * 10_000 * MIB
    assert Options(memory="1GiB").limit_bytes(survey) == 2**30


def _survey(kind: str, *, free_bytes: int) -> Survey:
    facts = device(free_bytes=free_bytes, kind=kind)
    assert isinstance(facts, DeviceFacts)
    return Survey(workload=workload(), device=facts)


def test_row_022_the_margin_of_a_prediction_is_told_in_bytes() -> None:
    """It stands in the plan's document, and the bound with it is what a limit is held against."""
    estimate = _forecast().predict(10)

    assert estimate is not None
    assert estimate.to_dict()["margin"] == CPU_MARGIN
    assert estimate.high_bytes - estimate.peak_bytes == int(estimate.peak_bytes * CPU_MARGIN)


def _forecast() -> CellForecast:
    traces = [trace_of((100, 10 * size), (0, 1, ~1), batch_size=size) for size in (2, 3)]
    return CellForecast(device_kind="cpu", law=fit_law(traces[0], traces[1]))


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(tuple(3 + 31 * number % 37 for number in range(40)), id="row 23: objects"),
        pytest.param((*(4,) * 35, 16, *(4,) * 4), id="row 26: a mosaic of four"),
        pytest.param(ASCENDING, id="row 27: sorted by length"),
    ],
)
def test_rows_023_026_027_the_worst_batch_is_probed(lengths: tuple[int, ...]) -> None:
    """What is found to be largest makes a batch, and the limit that all others keep is met."""
    loader_fn, config = padded(lengths), Config(batch_size=4)
    workload = live_workload(Squared, loader_fn)
    largest = find_largest(loader_fn(), seconds=10.0).indices
    usual = peak_in(workload, config)
    worst = run(workload, "memory", config, largest_samples=largest, limit_bytes=usual)

    assert lengths[largest[0]] == max(lengths)
    assert isinstance(worst, OutOfMemory)
    assert "above the limit" in worst.reason


def test_row_028_the_longest_batch_comes_first() -> None:
    """So that running out of memory shows in the first step, and not in the last epoch."""
    seen: list[int] = []

    class Telling(Squared):
        def forward(self, value: Tensor) -> Tensor:
            seen.append(value.shape[1])
            return super().forward(value)

    run(live_workload(Telling, texts), "memory", Config(batch_size=4), largest_samples=(39, 38))

    assert seen == [max(ASCENDING)] * 2


def test_row_024_evaluation_is_probed_too() -> None:
    """Its batches may be larger than those of training."""
    config = Config(batch_size=8)
    limit = peak_in(live_workload(Squared, rows_of(1)), config)
    workload = live_workload(Squared, rows_of(1), eval_loader_fn=rows_of(50))

    assert isinstance(run(workload, "verify", config, limit_bytes=limit), OutOfMemory)


def test_row_029_resuming_needs_no_more_than_training() -> None:
    """A checkpoint is loaded where the host's memory is, and stands where gradients stood."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    workload = live_workload(model, lambda batch_size: [(torch.ones(batch_size, 64),) * 2] * 4)
    limit = peak_in(workload, Config(batch_size=2))
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    saved = {"model": _copied(model.state_dict()), "optimizer": _copied(optimizer.state_dict())}
    optimizer = torch.optim.AdamW(model.parameters())

    with CpuDevice().watch(list(model.parameters()), limit_bytes=limit) as meter:
        meter.hold(tensors_in(saved))  # type: ignore[attr-defined]  # the tracker's own
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        saved.clear()
        _step(model, optimizer)

    assert meter.peak.allocated_bytes <= limit
    assert 'map_location="cpu"' in _text_of(training)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(value)
        if isinstance(value, dict)
        else value.clone()
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }


def _text_of(module: Any) -> str:
    with open(module.__file__, encoding="utf-8") as file:  # noqa: PTH123  # a test's own reading
        return file.read()


@pytest.mark.parametrize("implementation", ["default", "foreach", "fused"])
def test_row_030_the_first_optimizer_step_is_in_the_peak(implementation: str) -> None:
    """Lazily made state; and where the step makes tensors in passing, the peak is there."""
    model = nn.Linear(300, 300, bias=False)
    parameters = 300 * 300 * 4
    workload = live_workload(model, lambda batch_size: [(torch.ones(batch_size, 300),) * 2] * 4)
    config = Config(batch_size=1, optimizer_impl=implementation)

    peak = peak_in(workload, config)
    trace = _traced(lambda: nn.Linear(300, 300, bias=False), _wide, Cell.of(config))

    assert peak >= 4 * parameters  # with gradients and two moments
    assert (peak_of(trace).phase is Phase.OPTIMIZER) is (implementation != "fused")


def _wide(samples: int) -> list[Tensor]:
    return [torch.ones(samples, 300), torch.ones(samples, 300)]


@pytest.mark.parametrize("optimizer_fn", [torch.optim.Adagrad, torch.optim.AdamW])
def test_row_030_state_counts_whenever_it_is_made(optimizer_fn: Any) -> None:
    """Adagrad's is there before the first step, AdamW's after it: trace and pass count both."""
    workload = Workload(
        model_fn=lambda: nn.Linear(300, 300, bias=False),
        loader_fn=lambda batch_size: [_wide(batch_size)] * 4,
        optimizer_fn=optimizer_fn,
    )
    subject = Subject(
        workload=workload,
        model=workload.make_model(),
        pattern=Pattern(batch=_wide(2), samples=2, larger=_wide(3)),
    )
    trace = subject.trace(Cell(), 4)

    assert isinstance(trace, Trace)
    assert peak_of(trace).by_category[Category.OPTIMIZER_STATE] >= 300 * 300 * 4
    assert peak_bytes(trace) == peak_in(workload, Config(batch_size=4))


def test_row_033_a_prediction_is_not_the_last_word() -> None:
    """A forecast that says "fits" is still run, and what really happens is what counts."""
    workload, config = live_workload(Squared, texts), Config(batch_size=4)
    peak = peak_in(workload, config, largest_samples=(39,))

    assert isinstance(
        run(workload, "verify", config, largest_samples=(39,), limit_bytes=peak - 1), OutOfMemory
    )
    assert isinstance(
        run(workload, "verify", config, largest_samples=(39,), limit_bytes=peak), Measured
    )


def test_row_034_a_plan_is_made_at_the_longest_sample() -> None:
    """Not at the length of whatever comes first."""
    foreseen = foresee(Workload(model_fn=Squared, loader_fn=texts), device_kind="cpu")
    trace = foreseen.subject.trace(Cell(), 4)

    assert isinstance(trace, Trace)
    assert foreseen.subject.pattern.batch.shape[1] == len(ASCENDING)
    assert peak_bytes(trace) == peak_in(
        live_workload(Squared, texts), Config(batch_size=4), largest_samples=(39,)
    )


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_row_035_what_is_probed_is_the_real_step(amp: str) -> None:
    """Its precision, its accumulation, its optimizer: each changes the peak that was measured."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    workload = live_workload(model, lambda batch_size: [(torch.ones(batch_size, 64),) * 2] * 8)
    peaks = [
        peak_in(workload, Config(batch_size=256, amp=amp, accumulation_steps=steps))
        for steps in (1, 2)
    ]
    other = peak_in(workload, Config(batch_size=256, amp="bf16" if amp == "off" else "off"))

    assert peaks[0] < peaks[1]
    assert peaks[0] != other


class Hoarding(Squared):
    """A model that keeps what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, value: Tensor) -> Tensor:
        """Return one number."""
        self.kept.append(torch.ones(1000))
        return super().forward(value)


def test_row_035_memory_that_rises_after_the_probe_is_told() -> None:
    """In bytes a step, which says after how many steps a limit is met."""
    found = measured(run(live_workload(Hoarding(), rows_of(1)), "memory", Config(batch_size=2)))

    assert found.growth_bytes == 4000


def test_row_108_simulated_retries_make_a_size_unusable() -> None:
    """Near the limit a (simulated) allocator gives memory back to go on: it fits, and crawls."""
    trace = trace_of((400 * MIB, 600 * MIB, 700 * MIB), (0, ~0, 1, ~1, 2))
    near = simulate(trace, limit_bytes=900 * MIB)

    assert near.retries == 2
    assert simulate(trace).retries == 0
    with pytest.raises(passes.Unusable, match="2 times in 4 steps"):
        passes._refuse_thrashing(2, steps=4)


def test_row_109_simulated_fragments_are_reserved_and_pages_mend_them() -> None:
    """Changing shapes leave gaps that nothing fits into; expandable segments close them."""
    sizes = tuple((30 + 7 * number) * MIB for number in range(12))
    events = tuple(event for number in range(12) for event in (number, ~number))
    trace = trace_of(sizes, events)
    plain, paged = (simulate(trace, is_expandable=each) for each in (False, True))

    assert plain.reserved_bytes > 2 * plain.allocated_bytes
    assert paged.reserved_bytes < 1.2 * paged.allocated_bytes
    assert smallest_limit_bytes(trace) < plain.reserved_bytes


def test_row_109_simulated_gpu_reports_what_was_reserved() -> None:
    """The limit counts what the (simulated) allocator holds, and the record has both figures."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu()
        gpu.install(patch)
        cuda = CudaDevice(0)
        with cuda.watch([], limit_bytes=None) as meter:
            gpu.allocate(300 * MIB)
            gpu.allocated, gpu.reserved = 100 * MIB, 500 * MIB
            gpu.allocate(10 * MIB)
        peak = meter.peak

    assert (peak.allocated_bytes, peak.reserved_bytes) == (300 * MIB, 500 * MIB)


def test_row_114_a_cpu_has_a_limit_that_is_met() -> None:
    """It never runs out by itself, so a size is refused where live tensors pass the limit."""
    workload = live_workload(Squared, rows_of(100))
    limit = peak_in(workload, Config(batch_size=8))

    outcome = run(workload, "memory", Config(batch_size=64), limit_bytes=limit)

    assert isinstance(outcome, OutOfMemory)
    assert f"above the limit of {limit} bytes" in outcome.reason


def test_row_114_no_size_is_larger_than_the_data_set() -> None:
    """However much a CPU's memory would take; and a plan is within it too."""
    foreseen = foresee(Workload(model_fn=Squared, loader_fn=texts), device_kind="cpu")
    forecast = foreseen.forecast(Cell())

    assert isinstance(forecast, CellForecast)
    assert foreseen.with_largest(forecast, Cell(), 2**50)[0] == len(ASCENDING)


class Shared:
    """A simulated device: how much of this process lies outside of it, and what others have."""

    kind = "cuda"

    def __init__(self) -> None:
        self.spilled, self.others = 0, 0

    def spilled_bytes(self) -> int:
        """Return what spilled."""
        return self.spilled

    def others_bytes(self) -> int:
        """Return what others have."""
        return self.others


RAN = Measured(measurement=Measurement(peak_bytes=1))


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_row_116_simulated_spill_makes_numbers_useless(kind: str) -> None:
    """Memory behind a bus, or a disk, fails nowhere and crawls: it is no measurement."""
    shared = Shared()
    shared.kind = kind
    pressure = Pressure(shared)  # type: ignore[arg-type]  # as much of a device as is asked
    shared.spilled = SPILLED_BYTES
    outcome = pressure.judged(RAN)

    assert isinstance(outcome, Invalid)
    assert "64.0 MiB" in outcome.reason
    assert Pressure(shared).judged(RAN) == RAN  # type: ignore[arg-type]  # it was there before


def test_row_116_simulated_driver_that_gives_the_hosts_memory() -> None:
    """More is reserved than is in use on the (simulated) GPU by all but the others."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu()
        gpu.install(patch)
        cuda = CudaDevice(0)
        gpu.allocate(400 * MIB)
        before = cuda.spilled_bytes()
        gpu.reserved = gpu.allocated = 2 * TOTAL
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (0, TOTAL))
        gpu.lists_processes = False

        assert before == 0
        assert cuda.spilled_bytes() == TOTAL


def test_row_116_swapped_memory_is_told_by_the_kernel(tmp_path: Any) -> None:
    """A simulated status of this process says what was swapped out."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("VmSwap:\t  2048 kB\n")

    assert CpuDevice(host=Host(proc=tmp_path)).spilled_bytes() == 2 * MIB


@pytest.mark.parametrize(
    ("late", "is_cliff"), [(CLIFF * 1.01, True), (CLIFF * 0.99, False), (1.0, False)]
)
def test_row_116_a_cliff_in_time_is_no_measurement(late: float, *, is_cliff: bool) -> None:
    """Steps of equal work that become many times as slow, for good."""
    seconds = [1.0, 1.0, 1.2, late, late, late]
    cycles = [
        Cycle(seconds=each + 3.0, wait_seconds=3.0, samples=4, work_bytes=8) for each in seconds
    ]

    assert bool(cliff(cycles)) is is_cliff
    assert not cliff([*cycles[:-1], Cycle(seconds=4.0, wait_seconds=3.0, samples=4, work_bytes=8)])
    assert not cliff(cycles[:5])


@pytest.mark.parametrize("ran", [RAN, OutOfMemory(reason="out of memory")])
def test_row_116_simulated_others_that_take_more_are_named(ran: Measured | OutOfMemory) -> None:
    """A run that goes on has a word of it, and one that ran out has a reason."""
    shared = Shared()
    pressure = Pressure(shared)  # type: ignore[arg-type]  # as much of a device as is asked
    quiet = pressure.judged(ran)
    shared.others = TAKEN_BYTES
    told = pressure.judged(ran)

    assert quiet == ran
    assert type(told) is type(ran)
    assert told.reason.endswith("other processes took 256.0 MiB more of the device meanwhile")


def test_row_116_simulated_others_are_what_is_not_ours() -> None:
    """As the (simulated) driver counts; unknown where it lists no processes."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu()
        gpu.install(patch)
        cuda = CudaDevice(0)
        gpu.allocate(100 * MIB)
        known = cuda.others_bytes()
        gpu.lists_processes = False

        assert (known, cuda.others_bytes()) == (OTHERS, None)


def test_row_117_simulated_unified_memory_is_the_hosts() -> None:
    """An integrated GPU has what the host has available, and nowhere to spill to."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu()
        gpu.is_integrated, gpu.lists_processes, gpu.has_nvml = 1, False, False
        gpu.install(patch)
        patch.setattr(Host, "available_bytes", lambda _: 300 * MIB)
        patch.setattr(Host, "total_bytes", lambda _: 900 * MIB)
        cuda = CudaDevice(0)
        facts = cuda.facts()
        gpu.reserved = 3 * TOTAL

        assert (facts.free_bytes, facts.total_bytes) == (300 * MIB, 900 * MIB)
        assert Options().limit_bytes(_surveyed(facts)) <= 300 * MIB
        assert cuda.spilled_bytes() == 0


def test_row_117_simulated_unified_memory_has_a_hard_cap() -> None:
    """The allocator fails at the limit, where without one the host would hang."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu()
        gpu.is_integrated = 1
        gpu.install(patch)
        CudaDevice(0).guard(CONTEXT + 200 * MIB)
        gpu.allocate(200 * MIB)

        with pytest.raises(torch.OutOfMemoryError):
            gpu.allocate(1)


def _surveyed(facts: DeviceFacts) -> Survey:
    return Survey(workload=workload(), device=facts)


def test_row_118_simulated_mig_instance_is_asked_by_its_uuid() -> None:
    """By UUID alone: an instance has no index, and another's figures would be a whole GPU's."""
    asked: list[str] = []

    def handle(name: str) -> str:
        asked.append(name)
        if name != "MIG-12-ab":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu()
        patch.setattr(pynvml, "nvmlInit", lambda: None)
        patch.setattr(pynvml, "nvmlShutdown", lambda: None)
        patch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
        patch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda _: SimpleNamespace(used=OTHERS))
        patch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: [])
        patch.delattr(pynvml, "nvmlDeviceGetHandleByIndex")
        _install_without_driver(gpu, patch)
        facts = CudaDevice(0).facts()

    assert set(asked) == {"GPU-12-ab", "MIG-12-ab"}
    assert facts.total_bytes == TOTAL  # PyTorch's figure: the instance's


def _install_without_driver(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    """Put a fake GPU in the place of PyTorch's functions, and leave our driver module as it is."""
    from autotune.device import nvml  # noqa: PLC0415  # to keep what the fake would replace

    own = nvml.process_bytes, nvml.used_bytes
    gpu.install(patch)
    patch.setattr(nvml, "process_bytes", own[0])
    patch.setattr(nvml, "used_bytes", own[1])


class Mixed(nn.Module):
    """A block whose output goes beside its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, value: Tensor) -> Tensor:
        """Return the value, and what the layers make of it."""
        return value + torch.as_tensor(self.layers(value))


class Attending(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        """Return what the value attends to."""
        return torch.as_tensor(self.layer(value, value, value, need_weights=False)[0])


class Recurrent(nn.Module):
    """A recurrent layer of a kind."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer = kind(16, 16, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        """Return the states."""
        return torch.as_tensor(self.layer(value)[0])


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model[0].requires_grad_(requires_grad=False)
    return model


def _tied() -> nn.Module:
    layers = [nn.Linear(16, 16) for _ in range(3)]
    layers[2].weight = layers[0].weight
    return nn.Sequential(*layers)


def _vectors(samples: int) -> list[Tensor]:
    return [torch.randn(samples, 12, 16), torch.randn(samples, 12, 16)]


def _pictures(samples: int) -> list[Tensor]:
    return [torch.randn(samples, 8, 12, 12), torch.randn(samples, 8, 12, 12)]


_conv = partial(nn.Conv2d, kernel_size=3, padding=1)

TEN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)),
        _vectors,
    ),
    "residual": (
        lambda: nn.Sequential(*(Mixed(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3))),
        _vectors,
    ),
    "transformer": (
        lambda: nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        ),
        _vectors,
    ),
    "attention": (lambda: nn.Sequential(Attending(), nn.Dropout(0.1), Attending()), _vectors),
    "frozen": (_frozen, _vectors),
    "tied": (_tied, _vectors),
    "lstm": (lambda: Recurrent(nn.LSTM), _vectors),
    "gru": (lambda: Recurrent(nn.GRU), _vectors),
    "convolutions": (
        lambda: nn.Sequential(*(Mixed(_conv(8, 8), nn.BatchNorm2d(8)) for _ in range(3))),
        _pictures,
    ),
    "up and down": (
        lambda: nn.Sequential(
            _conv(8, 16),
            nn.MaxPool2d(2),
            nn.GroupNorm(2, 16),
            nn.Upsample(scale_factor=2),
            _conv(16, 8),
        ),
        _pictures,
    ),
}


def _traced(
    make: Callable[[], nn.Module], batch: Callable[[int], Any], cell: Cell, samples: int = 4
) -> Trace:
    workload = Workload(
        model_fn=make,
        loader_fn=lambda: iter(()),
        loss_fn=lambda model, pair: nn.functional.mse_loss(model(pair[0]), pair[1]),
    )
    pattern = Pattern(batch=batch(2), samples=2, larger=batch(3))
    trace = Subject(workload=workload, model=make(), pattern=pattern).trace(cell, samples)
    assert isinstance(trace, Trace), trace
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("with_workspace", [False, True])
@pytest.mark.parametrize("cell", [Cell(), Cell(amp="bf16", checkpointing="full")], ids=str)
@pytest.mark.parametrize("name", TEN)
def test_row_120_categories_add_up_to_the_peak(
    name: str, cell: Cell, *, with_workspace: bool
) -> None:
    """To the byte, on ten models, as a plain sum over the trace finds it."""
    make, batch = TEN[name]
    trace = _traced(make, batch, cell)
    instant = peak_of(trace, with_workspace=with_workspace)

    expected = _most_at_once(trace, leave_out=None if with_workspace else Category.WORKSPACE)

    assert {key: size for key, size in instant.by_category.items() if size} == expected
    assert sum(instant.by_category.values()) == instant.peak_bytes
    assert instant.peak_bytes == peak_bytes(trace, with_workspace=with_workspace)


def _most_at_once(trace: Trace, *, leave_out: Category | None) -> dict[Category, int]:
    """Return the bytes of each category where their sum is largest, counted event by event."""
    live, most = dict[Category, int](), dict[Category, int]()
    for event in trace.events:
        number = event if event >= 0 else ~event
        category, size = trace.categories[number], trace.sizes[number]
        if category is not leave_out:
            live[category] = live.get(category, 0) + (size if event >= 0 else -size)
        if sum(live.values()) > sum(most.values()):
            most = dict(live)
    return {category: size for category, size in most.items() if size}


@pytest.mark.parametrize("name", TEN)
def test_row_120_each_category_is_what_it_says(name: str) -> None:
    """Parameters, gradients and state have the bytes of the model's own; the rest is there too."""
    make, batch = TEN[name]
    trace, model = _traced(make, batch, Cell()), make()
    sums = dict.fromkeys(Category, 0)
    for size, category in zip(trace.sizes, trace.categories, strict=True):
        sums[category] += size
    own = sum(item.nbytes for item in (*model.parameters(), *model.buffers()))
    trained = [item for item in model.parameters() if item.requires_grad]

    assert sums[Category.PARAMETERS] == own
    assert sums[Category.GRADIENTS] == 2 * sum(item.nbytes for item in trained)  # of two steps
    assert sums[Category.OPTIMIZER_STATE] == sum(2 * item.nbytes + 4 for item in trained)
    assert sums[Category.INPUTS] == sum(item.nbytes for item in batch(4))
    assert sums[Category.ACTIVATIONS] > 0
    assert sums[Category.TEMPORARIES] > 0


@pytest.mark.parametrize("name", ["convolutions", "up and down", "lstm"])
def test_row_120_workspace_is_a_category_of_its_own(name: str) -> None:
    """It is beside the tensors, in no limit, and grows as the law says."""
    make, batch = TEN[name]
    small, large, far = (_traced(make, batch, Cell(), samples) for samples in (2, 3, 24))
    law = fit_law(small, large)

    assert law is not None
    assert Category.WORKSPACE in small.categories
    assert 0 < peak_bytes(far, with_workspace=True) - peak_bytes(far) <= _largest_workspace(far)
    assert peak_bytes(law.at(24), with_workspace=True) == peak_bytes(far, with_workspace=True)


def _largest_workspace(trace: Trace) -> int:
    pairs = zip(trace.sizes, trace.categories, strict=True)
    return max(size for size, category in pairs if category is Category.WORKSPACE)


def test_row_120_simulated_gpu_has_no_workspace_of_a_cpu() -> None:
    """A trace that was made on a CPU takes as much of a (simulated) GPU as its tensors do."""
    make, batch = TEN["convolutions"]
    trace = _traced(make, batch, Cell(), 24)
    tensors = [
        event
        for event in trace.events
        if trace.categories[event if event >= 0 else ~event] is not Category.WORKSPACE
    ]

    assert len(tensors) < len(trace.events)
    assert simulate(trace) == simulate(replace(trace, events=tuple(tensors)))
