"""config.json: exactly what DESIGN 2.5 names, and back again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from strategies import ANSWER, configs, sample_summary, summaries

from autotune.errors import OptionInvalid
from autotune.outcome import OutOfMemory
from autotune.output.config_file import config_document, config_text, load
from autotune.space import Config
from autotune.summary import Summary


@given(configs())
def test_config_round_trip(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    """Whatever config was written is the one that is loaded."""
    path = tmp_path_factory.mktemp("out") / "config.json"
    path.write_text(config_text(replace(sample_summary(), config=config)))

    assert load(path) == config


@given(summaries())
def test_document_round_trip(summary: Summary) -> None:
    """The document is what a reader of its text gets, keys sorted."""
    text = config_text(summary)

    assert json.loads(text) == config_document(summary)
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_document_has_the_keys_of_the_contract() -> None:
    """Nothing is left out of config.json, and nothing is added."""
    document = config_document(sample_summary())

    assert set(document) == {
        *("schema_version", "verdict", "config", "measured", "baseline", "best_at_baseline_batch"),
        *("speedup", "global_batch", "workload", "machine", "versions", "autotune_version"),
    }
    assert set(document["baseline"]) == {"config", "outcome", "measured"}
    assert set(document["speedup"]) == {"value", "low", "high", "pairs", "is_confirmed"}


def test_unknown_is_null() -> None:
    """A baseline that ran out of memory has no figures, and there is no speed-up."""
    sample = sample_summary()
    baseline = replace(sample.baseline, outcome=OutOfMemory(reason="needs 2 GiB"))
    document = config_document(replace(sample, baseline=baseline, speedup=None))

    assert document["baseline"]["outcome"] == "out_of_memory"
    assert document["baseline"]["measured"] is None
    assert document["speedup"] is None
    assert document["best_at_baseline_batch"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "holds no config"),
        ('{"config": 3}', "holds no config"),
        ('{"config": {}, "schema_version": 99}', "schema version 1, but has 99"),
        ('{"config": {}, "schema_version": 1}', "needs a batch_size"),
        ('{"config": {"batch": 1}, "schema_version": 1}', "no knob named 'batch'"),
        ('{"config": {"batch_size": 0}, "schema_version": 1}', "at least 1, but got 0"),
        ('{"config": {"batch_size": 1, "amp": []}, "schema_version": 1}', "amp needs one of"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """A file that is no config.json of ours is refused with what is wrong."""
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(OptionInvalid, match=message):
        load(path)


def test_missing_file_is_refused_with_a_hint(tmp_path: Path) -> None:
    """A path that is not there, or a folder, is refused with an example."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(OptionInvalid, match="cannot be read") as caught:
            load(path)
        assert "config.json" in caught.value.hint


def test_answer_is_loaded_from_a_string_path(tmp_path: Path) -> None:
    """A path may be a string."""
    path = tmp_path / "config.json"
    path.write_text(config_text(sample_summary()))

    assert load(str(path)) == ANSWER
