"""How the figures of a run were got: method, machine, versions."""

from autotune.outcome import Measurement
from autotune.output import words
from autotune.summary import Summary
from autotune.units import format_bytes, format_duration


def how_measured(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Return figure → how it was got, in words."""
    measured = summary.measured
    rows = {
        "speed-up": _pairs_words(summary),
        "samples per second": "real samples end to end, the wait for the loader included",
        "peak memory": _peak_words(summary),
        "memory beforehand": _forecast_words(summary),
        "launches of the answer": str(measured.launches) if measured else "none",
        "wait for data": _wait_words(measured),
        "cost": words.cost_words(summary),
        "budget": format_duration(summary.time_budget_seconds),
        "goal": summary.goal,
        "samples per optimizer step": _batch_words(summary),
        "seed": str(summary.seed),
    }
    return tuple((figure, how) for figure, how in rows.items() if how)


def machine_facts(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Return what a reader needs to judge the figures: device, workload, machine, versions."""
    device = summary.device
    facts = {
        "device": f"{device.name} ({device.kind})",
        "usable cores": str(device.usable_cores),
        "device memory": f"{format_bytes(device.total_bytes)}, "
        f"{format_bytes(device.free_bytes)} of it free",
        "precisions": ", ".join(device.native_precisions).replace("off", "fp32"),
        "workload": f"{summary.workload.trainable_parameters:,} trainable parameters; "
        f"a batch is {summary.workload.batch}",
    }
    others = {key: str(value) for key, value in summary.machine.items()}
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    return tuple({**facts, **others, "versions": versions}.items())


def _pairs_words(summary: Summary) -> str:
    estimate = summary.speedup
    if estimate is None:
        return "no pairs of launches were run"
    return (
        f"{words.count(estimate.pairs, 'pair')} of launches, one of "
        f"{summary.reference.describe()} and one of its rival in each, in random order on the "
        f"same samples; the mean ratio with its 95 % interval, "
        f"{estimate.low:.3f} to {estimate.high:.3f}"
    )


def _wait_words(measured: Measurement | None) -> str:
    """Return how long the answer waited for data; empty where that is unknown."""
    if measured is None or measured.data_wait_share is None:
        return ""
    return f"{measured.data_wait_share:.1%} of the answer's time"


def _peak_words(summary: Summary) -> str:
    if summary.device.kind == "cuda":
        return "bytes that the caching allocator reserved, and the context"
    rss = summary.measured.process_rss_bytes if summary.measured else None
    return (
        "live bytes of tensors in an untimed pass; the whole process, which is not held against "
        f"the limit, took {format_bytes(rss)}"
    )


def _forecast_words(summary: Summary) -> str:
    """Return how memory was predicted, or why it was not; empty where nobody asked."""
    forecast = summary.forecast
    reasons = "; ".join(dict.fromkeys(forecast.untraced.values()))
    unseen = f"cannot be traced: {reasons}" if reasons else ""
    if forecast.peaks:
        count = words.count(sum(map(len, forecast.peaks.values())), "peak")
        told = f"{count} predicted in {format_duration(forecast.seconds)} by tracing the step"
        return f"{told}; some of it {unseen}" if unseen else told
    if not unseen:
        return ""
    return f"not predicted, since the step {unseen}; two measured sizes bound what others need"


def _batch_words(summary: Summary) -> str:
    how = "free to change" if summary.is_global_batch_free else "held in every trial"
    return f"{summary.global_batch:,}, {how}"
