"""What a run asks of its search: made from what is known of the workload and what was asked for."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.baseline import resolve_baseline
from autotune.candidates import build_space
from autotune.errors import WorkloadInvalid
from autotune.facts import Survey, WorkloadFacts
from autotune.machine import versions
from autotune.options import Options
from autotune.search.task import Task
from autotune.space import Config
from autotune.version import __version__


def fingerprint_of(survey: Survey) -> dict[str, Any]:
    """Return what must be the same for a launch to be worth something in another run."""
    device = survey.device
    return dict(survey.workload.fingerprint) | {
        "device": f"{device.kind} {device.name}",
        "usable cores": device.usable_cores,
        "versions": versions(),
        "autotune": __version__,
    }


def make_task(survey: Survey, options: Options, *, largest_samples: tuple[int, ...]) -> Task:
    """Return what the search is asked, from what is known and what was asked for.

    Raises:
        OptionInvalid: If the options contradict the workload, the device or each other.
        WorkloadInvalid: If no batch size can be given to the loader.
    """
    device = survey.device
    workload = replace(survey.workload, largest_samples=largest_samples)
    baseline, global_batch = resolve_baseline(
        workload, device, given=baseline_of(survey, options), global_batch=options.global_batch
    )
    return Task(
        space=build_space(
            workload,
            device,
            baseline=baseline,
            global_batch=global_batch,
            space=options.space,
        ),
        baseline=baseline,
        workload=workload,
        device=device,
        limit_bytes=options.limit_bytes(survey),
        goal=options.goal or "throughput",
        seed=options.seed or 0,
    )


def baseline_of(survey: Survey, options: Options) -> Mapping[str, Any] | Config | None:
    """Return what the user has today: what was given, over the settings of their `DataLoader`.

    Raises:
        WorkloadInvalid: If no batch size can be given to the loader.
    """
    fixed = fixed_batch_size(survey.workload, options)
    if isinstance(options.baseline, Config):
        return options.baseline
    ignored = {"batch_size"} | ({"pin_memory"} if survey.device.kind == "cpu" else set())
    stated = survey.workload.stated_settings
    today = {name: value for name, value in stated.items() if name not in ignored}
    return today | fixed | dict(options.baseline or {})


def fixed_batch_size(workload: WorkloadFacts, options: Options) -> dict[str, Any]:
    """Return the batch size that the user fixed, where `loader_fn` cannot be given any.

    Raises:
        WorkloadInvalid: If it cannot, and the user fixed none.
    """
    if "batch_size" in workload.loader_settings:
        return {}
    wanted = (options.space or {}).get("batch_size", ())
    sizes = [wanted] if isinstance(wanted, int) else list(wanted)
    if len(sizes) == 1:
        return {"batch_size": sizes[0]}
    raise WorkloadInvalid(
        "loader_fn needs to accept batch_size, but of the loader's settings it accepts "
        f"{', '.join(workload.loader_settings) or 'none'}",
        hint="def loader_fn(batch_size, …): …\nor, where the loader has one built in, fix it: "
        '--knob batch_size=N (in Python: space={"batch_size": [N]})',
    )


def signature(task: Task) -> str:
    """Return the name of a search's studies: what cannot be compared has another one."""
    told = (
        sorted(task.workload.fingerprint.items()),
        task.device.name,
        sorted(versions().items()),
        task.limit_bytes,
        task.goal,
        task.space.global_batch,
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]
