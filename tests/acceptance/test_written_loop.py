"""The written loop: it trains with what was found, and needs nothing of ours."""

import ast
import json
import os
import sys

import pytest

from acceptance.product import Ended, python

pytestmark = pytest.mark.slow

WITHOUT_AUTOTUNE = """
import runpy, sys
sys.modules["autotune"] = None  # to import it now raises
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def source(tuned: Ended) -> ast.Module:
    """The loop's syntax tree."""
    return ast.parse((tuned.out / "train.py").read_text("utf-8"))


@pytest.fixture(scope="module")
def losses(tuned: Ended, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one epoch, as the workload's own `loss_fn` saw them."""
    folder = tmp_path_factory.mktemp("losses")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "LOSSES", str(folder / "losses"))
        loop = str(tuned.out / "train.py")
        ended = python("-c", WITHOUT_AUTOTUNE, loop, "--epochs", "1", cwd=folder)
    assert ended.code == 0, ended.stderr
    assert ended.left == []
    return [float(line) for line in (folder / "losses").read_text("utf-8").splitlines()]


def test_it_imports_nothing_of_ours(source: ast.Module) -> None:
    """PyTorch and what comes with Python, on every level of the file."""
    roots = {name.partition(".")[0] for node in ast.walk(source) for name in _imported(node)}

    assert "torch" in roots
    assert roots - set(sys.stdlib_module_names) == {"torch"}


def test_it_holds_the_settings(tuned: Ended, source: ast.Module) -> None:
    """`CONFIG` is a literal with the very config of config.json, for a person to change."""
    values = [
        node.value
        for node in source.body
        if isinstance(node, ast.AnnAssign | ast.Assign) and "CONFIG" in ast.unparse(node)
    ]

    config = ast.literal_eval(values[0] or ast.Constant(None))
    assert config == json.loads((tuned.out / "config.json").read_text("utf-8"))["config"]


def test_it_has_the_names_of_the_contract(source: ast.Module) -> None:
    """`build` and `train` are there to be called, each with a model and a loader_fn."""
    functions = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}

    for name in ("build", "train"):
        assert [each.arg for each in functions[name].args.args][:2] == ["model", "loader_fn"]


def test_it_runs_the_tuned_batches(tuned: Ended, losses: list[float]) -> None:
    """One epoch has as many micro-batches as 512 samples make, then those of the evaluation."""
    size = tuned.config["batch_size"]

    assert len(losses) == -(-512 // size) + -(-64 // size)


def test_its_loss_falls(losses: list[float]) -> None:
    """One epoch without autotune at hand trains the model."""
    assert losses[-1] < 0.8 * losses[0]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "."]
    return []
