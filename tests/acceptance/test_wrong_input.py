"""Wrong input ends with the code that DESIGN 2.4 gives it, and with words that help."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from acceptance.product import OUR_FOLDER, Ended, autotune, write_workload
from autotune.cli import main

SCRIPTS = {
    "no_loader_fn": "del loader_fn",
    "no_batch_size": """
        def loader_fn(num_workers=0):
            return DataLoader(TensorDataset(INPUTS, TARGETS), 32, num_workers=num_workers)
    """,
    "empty_loader": """
        def loader_fn(batch_size=32):
            return DataLoader(TensorDataset(INPUTS[:0], TARGETS[:0]), batch_size)
    """,
    "loss_of_many": """
        def loss_fn(model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    """,
    "nothing_to_train": """
        def model_fn():
            return Net().requires_grad_(False)
    """,
    "raises_on_import": "raise KeyError('the data went away')",
    "raises_in_loader_fn": """
        def loader_fn(batch_size=32):
            raise OSError("the disk is gone")
    """,
    "raises_in_step": """
        class Net(Net):
            def forward(self, inputs):
                raise ArithmeticError("the heads do not divide the width")
    """,
}
"""Name → what makes the tiny workload wrong."""

OPTIONS = {"no_such_device": ("--device", "cuda:97")}
"""Name → options that this machine cannot follow, with the workload as it should be."""

MEANINGLESS = {
    "bathc_size": ("--knob", "bathc_size=8"),
    "much": ("--memory", "much"),
    "soon": ("--time-budget", "soon"),
    "got '0'": ("--trials=1", "--global-batch", "0"),
    "--batchsize": ("--batchsize", "8"),
    "fame": ("--goal", "fame"),
    "-3": ("--trials", "-3"),
    "batch_size": ("--knob", "batch_size"),
    "script": (),
}
"""What an error names → options that mean nothing, whatever the workload is."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every wrong script and every wrong option, run two at a time: nothing is timed here."""
    folder = tmp_path_factory.mktemp("wrong")
    scripts = {name: write_workload(folder, extra, name=name) for name, extra in SCRIPTS.items()}
    scripts |= {name: write_workload(folder) for name in OPTIONS}

    def run(name: str) -> Ended:
        return autotune(scripts[name], *OPTIONS.get(name, ()), out=folder / "out" / name)

    names = [*SCRIPTS, *OPTIONS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*SCRIPTS, *OPTIONS} - {"raises_in_step"}))
def test_what_is_wrong_before_the_first_step_is_code_2(ended: dict[str, Ended], name: str) -> None:
    """One document on stdout says what was wrong; there is no traceback of ours and no process."""
    run = ended[name]

    assert run.code == run.document["exit_code"] == 2
    assert set(run.document) == {"error", "exit_code"}
    assert set(run.error) == {"type", "message", "hint"}
    assert run.error["message"]
    assert OUR_FOLDER not in run.stderr
    assert run.left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_loader_fn", ["loader_fn", "def loader_fn"]),
        ("no_batch_size", ["batch_size", "num_workers"]),
        ("empty_loader", ["loader_fn", "yields nothing"]),
        ("loss_of_many", ["one number", "(32,)"]),
        ("nothing_to_train", ["requires", "Net"]),
        ("raises_on_import", ["KeyError", "the data went away", "raises_on_import.py"]),
        ("raises_in_loader_fn", ["OSError", "the disk is gone", "raises_in_loader_fn.py"]),
        ("no_such_device", ["cuda:97"]),
    ],
)
def test_the_words_name_what_was_seen(ended: dict[str, Ended], name: str, words: list[str]) -> None:
    """A message and its hint tell what was met and what would be right."""
    error = ended[name].error

    said = f"{error['message']}\n{error['hint']}"
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize("word", MEANINGLESS)
def test_an_option_that_means_nothing_is_code_2(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before anything is started, and named; one document on stdout tells so."""
    options = MEANINGLESS[word]
    where = [str(tmp_path / "a.py"), "--out", str(tmp_path / "out")] if options else []

    code = main([*where, *options, "--json"])

    document = json.loads(capsys.readouterr().out)
    assert code == document["exit_code"] == 2
    assert word in f"{document['error']['message']} {document['error']['hint']}".lower()


@pytest.mark.slow
def test_a_step_that_raises_is_code_4(ended: dict[str, Ended]) -> None:
    """What fails is the user's own, so their traceback is shown, and none of our frames."""
    run = ended["raises_in_step"]

    assert run.code == run.document["exit_code"] == 4
    assert "ArithmeticError: the heads do not divide the width" in run.stderr
    assert 'raises_in_step.py", line' in run.stderr
    assert OUR_FOLDER not in run.stderr
    assert run.left == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file/below", "/proc/autotune"])
def test_a_folder_that_cannot_be_is_code_2(tmp_path: Path, where: str) -> None:
    """Below a regular file, or where nobody may write: found out before any work is done."""
    (tmp_path / "file").write_text("", "utf-8")
    script = write_workload(tmp_path, "raise SystemExit('the script was run')")

    run = autotune(script, out=tmp_path / where)

    assert run.code == 2
    assert run.error["type"] == "OutFolderUnusable"
    assert where in run.error["message"]
