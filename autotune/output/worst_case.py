"""Which worst cases of memory a run probed, in words."""

from autotune.facts import WorkloadFacts


def worst_cases(workload: WorkloadFacts) -> dict[str, str]:
    """Return each worst case → whether it was probed, and how."""
    length, scanned = workload.dataset_length, workload.scanned_samples
    largest = "probed with the largest of the first batches, repeated"
    if scanned and not workload.largest_samples:
        largest = f"all of the {scanned} samples looked at are of one size"
    elif scanned:
        share = f" ({scanned / length:.0%} of the data set)" if length else ""
        largest = f"probed with the largest of {scanned} samples{share}"
    has_evaluation = workload.has_evaluation
    return {
        "longest batch": largest,
        "first optimizer step": "probed: two whole cycles from a fresh start",
        "evaluation": "probed with one batch" if has_evaluation else "no eval_loader_fn was given",
        "last short batch": _last_short_batch(workload),
        "resuming from a checkpoint": "not probed",
    }


def _last_short_batch(workload: WorkloadFacts) -> str:
    if workload.drops_last:
        return "the loader drops it"
    if workload.is_map_style and workload.dataset_length:
        return "probed, where the data set is no multiple of the batch"
    return "not probed: where an epoch ends is not known"
