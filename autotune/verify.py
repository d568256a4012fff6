"""A saved configuration, launched again: does it still fit, and is it as fast as it was?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.asking import fingerprint_of
from autotune.errors import NoLongerHolds, OptionInvalid
from autotune.facts import Survey
from autotune.outcome import Measured, Measurement, Outcome, Request, Runner
from autotune.output.config_file import load_document
from autotune.run import open_script
from autotune.space import Config
from autotune.units import format_bytes

SLOWER = 0.85
"""Of the lower end of the saved interval; two launches of one config differ by 3 to 11 % (METHOD.md
0.5), so that one launch below this is no accident."""

CYCLES = 10
"""Optimizer steps that are timed."""

LAUNCH_SECONDS = 600.0
"""Time limit of a launch."""

SCAN_SECONDS = 5.0
"""How long to look for the largest samples."""


def verify(path: str | Path) -> list[str]:
    """Launch a saved configuration on this machine, once for memory and once for speed.

    Args:
        path: A `config.json`.

    Returns:
        What was found, in sentences.

    Raises:
        NoLongerHolds: If it does not fit, fails, or is clearly slower than it was.
        OptionInvalid: If the file is no `config.json`, or does not say which script it is of.
    """
    document = load_document(path)
    script, saved = _script_of(document, path), document["measured"] or {}
    config = Config.from_dict(document["config"])
    with open_script(script, device=document["machine"].get("device_kind")) as runner:
        survey = runner.survey(scan_seconds=SCAN_SECONDS)
        found = _changes(document, survey)
        found.append(_fits(runner, config, survey, saved))
        found.append(_is_as_fast(runner, config, saved))
    return found


def _script_of(document: Mapping[str, Any], path: str | Path) -> str:
    script: str = document["workload"].get("script") or ""
    if not Path(script).is_file():
        raise OptionInvalid(
            f"{path} needs the script that it was made of, but {script or 'it names none'} "
            "is not there",
            hint="run from the folder in which it was tuned",
        )
    return script


def _changes(document: Mapping[str, Any], survey: Survey) -> list[str]:
    now = fingerprint_of(survey)
    names = sorted(set(now) & set(document["workload"]))
    changed = [name for name in names if now[name] != document["workload"][name]]
    return [f"changed since it was tuned: {', '.join(changed)}"] if changed else []


def _fits(runner: Runner, config: Config, survey: Survey, saved: Mapping[str, Any]) -> str:
    limit_bytes = saved.get("limit_bytes")
    request = Request(
        purpose="verify",
        config=config,
        limit_bytes=limit_bytes,
        largest_samples=survey.workload.largest_samples,
        time_limit_seconds=LAUNCH_SECONDS,
    )
    seen = _measured(runner(request).outcome, config)
    peak = format_bytes(seen.peak_bytes)
    return f"it fits: {peak} of {format_bytes(limit_bytes)}"


def _is_as_fast(runner: Runner, config: Config, saved: Mapping[str, Any]) -> str:
    request = Request(
        purpose="train", config=config, cycles=CYCLES, time_limit_seconds=LAUNCH_SECONDS
    )
    rate = _measured(runner(request).outcome, config).samples_per_second or 0.0
    was = _lower_rate(saved)
    if rate < SLOWER * was:
        raise NoLongerHolds(
            f"{config.describe()} reaches {rate:,.1f} samples/s, where it reached {was:,.1f}",
            hint="is other work running on this machine? else tune again",
        )
    return f"it is as fast: {rate:,.1f} samples/s"


def _lower_rate(saved: Mapping[str, Any]) -> float:
    """Return the lower end of what was reached when it was tuned; 0 where that is unknown."""
    interval = saved.get("samples_per_second_interval")
    rate: float | None = interval[0] if interval else saved.get("samples_per_second")
    return rate or 0.0


def _measured(outcome: Outcome, config: Config) -> Measurement:
    if isinstance(outcome, Measured):
        return outcome.measurement
    words = outcome.name.replace("_", " ")
    raise NoLongerHolds(
        f"{config.describe()} ended {words}: {outcome.reason}", hint="tune again, with its script"
    )
