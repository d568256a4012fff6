"""Records to test with: Hypothesis strategies of every record, and sample runs in full."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from autotune.facts import DeviceFacts, WorkloadFacts
from autotune.knobs import OPTIMIZER_IMPLS, PRECISIONS
from autotune.outcome import (
    Crashed,
    Invalid,
    Launch,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    Skipped,
    TimedOut,
    Trial,
)
from autotune.space import Config
from autotune.summary import Summary
from autotune.verdict import Estimate

MIB = 2**20

sizes = st.integers(min_value=1, max_value=2**20)
byte_counts = st.integers(min_value=1, max_value=2**45)
figures = st.floats(min_value=1e-6, max_value=1e9)
texts = st.text(max_size=40)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any config that keeps the rules."""
    workers = draw(st.integers(min_value=0, max_value=16))
    return Config(
        batch_size=draw(sizes),
        accumulation_steps=draw(sizes),
        amp=draw(st.sampled_from(PRECISIONS)),
        num_workers=workers,
        prefetch_factor=draw(st.none() | st.integers(1, 8)) if workers else None,
        persistent_workers=draw(st.booleans()) if workers else False,
        pin_memory=draw(st.booleans()),
        cudnn_benchmark=draw(st.booleans()),
        threads=draw(st.none() | st.integers(1, 64)),
        channels_last=draw(st.booleans()),
        optimizer_impl=draw(st.sampled_from(OPTIMIZER_IMPLS)),
    )


measurements = st.builds(
    Measurement,
    samples_per_second=st.none() | figures,
    samples_per_second_interval=st.none() | st.tuples(figures, figures),
    step_seconds=st.none() | figures,
    optimizer_step_seconds=st.none() | figures,
    data_wait_share=st.none() | st.floats(0, 1),
    peak_bytes=st.none() | byte_counts,
    peak_allocated_bytes=st.none() | byte_counts,
    peak_reserved_bytes=st.none() | byte_counts,
    process_rss_bytes=st.none() | byte_counts,
    limit_bytes=st.none() | byte_counts,
    samples_per_optimizer_step=st.none() | sizes,
    launches=st.integers(1, 20),
)

outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Measured, measurement=measurements, reason=texts),
    st.builds(OutOfMemory, reason=texts),
    st.builds(Skipped, reason=texts),
    st.builds(TimedOut, reason=texts),
    st.builds(Crashed, reason=texts),
    st.builds(Invalid, reason=texts),
)

launches = st.builds(
    Launch,
    started_at=texts,
    seed=st.integers(0, 2**31),
    step_seconds=st.lists(figures, max_size=4).map(tuple),
    peak_bytes=st.none() | byte_counts,
    load=st.none() | figures,
)


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    """Any trial that a log can hold: what it skipped and why is in the trial as well."""
    outcome = draw(outcomes)
    predicted = draw(st.none() | byte_counts)
    if isinstance(outcome, Skipped):
        outcome = replace(outcome, predicted_peak_bytes=predicted)
    return Trial(
        number=draw(st.integers(0, 999)),
        study=draw(st.sampled_from(["memory", "compute", "loader", "e2e", "checks"])),
        phase=draw(st.sampled_from(["0", "A", "B", "C", "D", "E", "F", "verdict", "verify"])),
        config=draw(configs()),
        outcome=outcome,
        predicted_peak_bytes=predicted,
        launches=tuple(draw(st.lists(launches, max_size=2))),
        started_at=draw(texts),
        wall_seconds=draw(figures),
        is_reused=draw(st.booleans()),
    )


estimates = st.builds(
    Estimate,
    value=figures,
    low=figures,
    high=figures,
    pairs=st.integers(1, 10),
    is_confirmed=st.booleans(),
)


@st.composite
def summaries(draw: st.DrawFn) -> Summary:
    """Any run, with any text where a user's text may stand."""
    return replace(
        sample_summary(),
        verdict=draw(st.sampled_from(["tuned", "keep", "unconfirmed", "interrupted"])),
        config=draw(configs()),
        measured=draw(st.none() | measurements),
        baseline=draw(trials()),
        best_at_baseline_batch=draw(st.none() | trials()),
        reference=draw(configs()),
        speedup=draw(st.none() | estimates),
        is_global_batch_free=draw(st.booleans()),
        limit_bytes=draw(byte_counts),
        goal=draw(st.sampled_from(["throughput", "memory"])),
        trials=tuple(draw(st.lists(trials(), max_size=4))),
        machine={"host": draw(texts), "cores": draw(sizes)},
        left_out={"amp": draw(texts)},
        notes=tuple(draw(st.lists(texts, max_size=2))),
        command=draw(texts),
        script=draw(st.none() | texts.filter(bool)),
        worst_case={"largest batch": draw(texts)},
    )


def measured(
    samples_per_second: float | None, *, peak_mib: float | None = None, launches: int = 1
) -> Measured:
    """A trial's end with the figures that a report shows."""
    rate = samples_per_second
    return Measured(
        measurement=Measurement(
            samples_per_second=rate,
            samples_per_second_interval=(rate * 0.97, rate * 1.03) if rate else None,
            step_seconds=16 / rate if rate else None,
            optimizer_step_seconds=32 / rate if rate else None,
            data_wait_share=0.04,
            peak_bytes=int(peak_mib * MIB) if peak_mib else None,
            peak_allocated_bytes=int(peak_mib * MIB) if peak_mib else None,
            process_rss_bytes=900 * MIB,
            limit_bytes=768 * MIB,
            samples_per_optimizer_step=32,
            launches=launches,
        )
    )


def trial(
    number: int,
    config: Config,
    outcome: Outcome,
    *,
    phase: str = "A",
    study: str = "compute",
    predicted_mib: float | None = None,
    launched: int = 1,
) -> Trial:
    """One trial of a sample run."""
    launch = Launch(started_at="2026-01-31T12:00:00+00:00", seed=0, step_seconds=(0.4, 0.41))
    return Trial(
        number=number,
        study=study,
        phase=phase,
        config=config,
        outcome=outcome,
        predicted_peak_bytes=int(predicted_mib * MIB) if predicted_mib else None,
        launches=(launch,) * launched,
        started_at="2026-01-31T12:00:00+00:00",
        wall_seconds=2.5,
    )


BASELINE = Config(batch_size=32)
ANSWER = Config(
    batch_size=16,
    accumulation_steps=2,
    amp="bf16",
    num_workers=1,
    prefetch_factor=2,
    persistent_workers=True,
)


def sample_summary() -> Summary:
    """A run on a CPU, as `examples/bert.py` gives it."""
    return Summary(
        verdict="tuned",
        config=ANSWER,
        measured=measured(132.4, peak_mib=412.7, launches=6).measurement,
        baseline=trial(
            0, BASELINE, measured(68.43, peak_mib=604.2, launches=7), phase="0", study="e2e"
        ),
        reference=BASELINE,
        speedup=Estimate(value=1.934, low=1.881, high=1.979, pairs=6, is_confirmed=True),
        global_batch=32,
        limit_bytes=768 * MIB,
        trials=tuple(_sample_trials()),
        workload=sample_facts(),
        device=sample_device(),
        machine={"host": "desk", "system": "Linux 6.1", "cores": 2, "memory": "7.8 GiB"},
        versions={"torch": "2.14.1", "python": "3.11.7", "optuna": "5.0.0"},
        left_out={
            "pin_memory": "there is no CUDA device to copy to",
            "cudnn_benchmark": "a CPU does not use cuDNN",
        },
        notes=("fp16 is not native on this CPU and was not tried.",),
        command="python -m autotune examples/bert.py --memory 768MiB",
        script="examples/bert.py",
        time_budget_seconds=180.0,
        wall_seconds=161.2,
        worst_case={
            "largest batch": "one batch of the 32 largest samples found, two whole cycles",
            "evaluation": "one batch of eval_loader_fn, within the limit",
            "data set scanned": "2,600 of 2,600 samples",
        },
    )


def sample_facts() -> WorkloadFacts:
    """The workload of `sample_summary`."""
    return WorkloadFacts(
        dataset_length=2600,
        loader_settings=("batch_size", "num_workers", "prefetch_factor", "persistent_workers"),
        stated_batch_size=32,
        parameter_bytes=18 * MIB,
        trainable_parameters=4_600_000,
        has_convolutions=False,
        has_batch_norm=False,
        varies_in_shape=True,
        drops_last=False,
        loss="named",
        weight="labels",
        nesting="dict",
        is_map_style=True,
        has_evaluation=True,
        functions=("model_fn", "eval_loader_fn"),
        eval_loader_settings=("batch_size",),
        batch="dict of input_ids [32, 64] int64, labels [32, 64] int64",
        largest_samples=(17, 4, 1022),
        scanned_samples=2600,
        fingerprint={"script": "3f9ab2", "parameters": [["weight", [256, 256], "float32"]]},
    )


def sample_device() -> DeviceFacts:
    """The device of `sample_summary`."""
    return DeviceFacts(
        kind="cpu",
        name="Intel(R) Xeon(R) Platinum 8581C CPU @ 2.10GHz",
        native_precisions=("off", "bf16"),
        total_bytes=8_000 * MIB,
        free_bytes=6_000 * MIB,
        usable_cores=2,
        threads=2,
    )


def _sample_trials() -> Sequence[Trial]:
    ends: list[tuple[str, str, Config, Outcome, float | None]] = []
    base = measured(68.43, peak_mib=604.2, launches=1)
    ends.append(("0", "e2e", BASELINE, base, None))
    for amp, speed, scale in (("off", 66.0, 1.0), ("bf16", 121.0, 0.62)):
        for batch in (1, 2, 4, 8, 16, 32):
            config = Config(batch_size=batch, accumulation_steps=32 // batch, amp=amp)
            rate = speed * batch / (batch + 0.8)
            peak = (90 + 16 * batch) * scale + 20
            ends.append(("A", "memory", config, measured(None, peak_mib=peak), peak * 1.03))
            ends.append(("A", "compute", config, measured(rate), None))
    fp16 = Config(batch_size=32, amp="fp16")
    ends.append(("A", "checks", fp16, Invalid(reason="the loss is not finite: nan"), None))
    ends.append(("A", "compute", Config(batch_size=64), OutOfMemory(reason="needs 1.2 GiB"), 1210))
    skipped = Skipped(reason="predicted 2.3 GiB of 768 MiB", predicted_peak_bytes=2300 * MIB)
    ends.append(("A", "memory", Config(batch_size=128), skipped, 2300))
    crashed = Crashed(reason="SIGSEGV", log_tail="Segmentation fault")
    ends.append(("D", "loader", BASELINE.with_workers(2), crashed, None))
    timed_out = TimedOut(reason="no answer within 20 s")
    ends.append(("D", "loader", BASELINE.with_workers(1), timed_out, None))
    for config, rate in ((ANSWER, 131.0), (ANSWER.with_workers(0), 127.0)):
        ends.append(("E", "e2e", config, measured(rate, launches=3), None))
    ends.append(("verdict", "e2e", ANSWER, measured(132.4, peak_mib=412.7, launches=6), None))
    ends.append(("verify", "memory", ANSWER, measured(None, peak_mib=412.7), 420))
    return [
        trial(
            number,
            config,
            outcome,
            phase=phase,
            study=study,
            predicted_mib=predicted,
            launched=0 if isinstance(outcome, Skipped) else 1,
        )
        for number, (phase, study, config, outcome, predicted) in enumerate(ends)
    ]
