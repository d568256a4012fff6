"""config.json: the answer with its figures, and the way back from the file to a config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from autotune.errors import OptionInvalid
from autotune.outcome import SCHEMA_VERSION, Measurement, Trial
from autotune.space import Config
from autotune.summary import Summary
from autotune.version import __version__

_HINT = "give the config.json of a run, for example reports/bert/config.json"


def config_document(summary: Summary) -> dict[str, Any]:
    """Return what `config.json` holds (DESIGN 2.5): plain values, what is unknown as None.

    It equals what a reader of the file gets: `json.loads(config_text(summary))`.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "verdict": summary.verdict,
        "config": summary.config.to_dict(),
        "measured": _measured(summary.measured),
        "baseline": _trial(summary.baseline),
        "best_at_baseline_batch": _trial(summary.best_at_baseline_batch),
        "speedup": summary.speedup.to_dict() if summary.speedup else None,
        "global_batch": summary.global_batch,
        "workload": dict(summary.workload.fingerprint) | {"script": summary.script},
        "machine": dict(summary.machine),
        "versions": dict(summary.versions),
        "autotune_version": __version__,
    }
    return cast("dict[str, Any]", json.loads(_as_text(document)))


def config_text(summary: Summary) -> str:
    """Return `config.json` as it is written: keys sorted, two spaces of indent."""
    return _as_text(config_document(summary))


def load(path: str | Path) -> Config:
    """Return the config of a `config.json`.

    Raises:
        OptionInvalid: If the file is not there, is no `config.json` of a schema version that
            is known here, or holds a knob or a value that is not.
    """
    return Config.from_dict(load_document(path)["config"])


def load_document(path: str | Path) -> dict[str, Any]:
    """Return all that a `config.json` holds.

    Raises:
        OptionInvalid: If the file is not there, or is no `config.json` of a schema version that
            is known here.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionInvalid(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
    except ValueError as error:  # of JSON, or of UTF-8
        raise OptionInvalid(f"{path} is not JSON: {error}", hint=_HINT) from error
    if not isinstance(document, dict) or not isinstance(document.get("config"), Mapping):
        raise OptionInvalid(f"{path} is JSON, but holds no config", hint=_HINT)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise OptionInvalid(
            f"{path} needs schema version {SCHEMA_VERSION}, but has {version!r}",
            hint="read it with the autotune that wrote it, or tune again",
        )
    return document


def _as_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _trial(trial: Trial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    return {
        "config": trial.config.to_dict(),
        "outcome": trial.outcome.name,
        "measured": _measured(trial.measured),
    }


def _measured(measurement: Measurement | None) -> dict[str, Any] | None:
    return measurement.to_dict() if measurement else None
