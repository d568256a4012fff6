"""`fit` on live objects, from wherever a person writes Python (DESIGN 2.1 and 4)."""

import json
from pathlib import Path
from typing import Any

import pytest

from acceptance.product import Ended, python

pytestmark = pytest.mark.slow

PROGRAM = """
import json
import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import autotune

with open("runs", "a") as file:
    file.write(__name__ + "\\n")  # once for each time that this program is run

class Samples(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, generator=generator)
        return inputs, (inputs.sum() > 0).long()

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
        self.activate = lambda inputs: inputs * SCALE

    def forward(self, inputs):
        return self.activate(self.layers(inputs))

SCALE = 0.5

def make_loader_fn(data):
    def loader_fn(batch_size=32, num_workers=0):
        collate = lambda samples: default_collate([(x * SCALE, y) for x, y in samples])
        return DataLoader(data, batch_size, True, num_workers=num_workers, collate_fn=collate)
    return loader_fn

model = Net(16)
weights = [each.clone() for each in model.parameters()]
result = autotune.fit(
    model,
    make_loader_fn(Samples()),
    loss_fn=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer_fn=lambda params: torch.optim.SGD(params, lr=0.1),
    baseline={"num_workers": 1},
    isolate=True,
    time_budget="60s",
    trials=6,
    progress=False,
)
losses = result.train(epochs=3)
print(json.dumps({
    "verdict": result.verdict,
    "config": result.config.to_dict(),
    "trials": [[trial.config.num_workers, trial.outcome.name] for trial in result.trials],
    "was_kept": kept,
    "losses": losses,
    "children": [child.name() for child in psutil.Process().children(recursive=True)],
}))
""".replace("losses =", "kept = all(map(torch.equal, weights, model.parameters()))\nlosses =", 1)
"""No `__main__` guard, and about everything that a plain pickle cannot send."""


@pytest.fixture(scope="module", params=["file", "stdin", "notebook"])
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the program told, run as a file, from stdin, and in the kernel of a notebook."""
    folder = tmp_path_factory.mktemp(request.param)
    answer = {"file": _from_file, "stdin": _from_stdin, "notebook": _in_notebook}
    text = answer[request.param](folder)
    told: dict[str, Any] = json.loads(text.splitlines()[-1])
    return told | {"runs": (folder / "runs").read_text("utf-8").split()}


def test_lambdas_closures_and_classes_of_main_are_sent(told: dict[str, Any]) -> None:
    """Every launch runs, each in a process of its own."""
    assert {outcome for _, outcome in told["trials"]} <= {"measured", "skipped"}
    assert told["config"]["batch_size"] >= 1
    assert told["verdict"] in {"tuned", "keep", "unconfirmed"}


def test_loader_workers_take_a_lambda(told: dict[str, Any]) -> None:
    """A worker has the start method that the user's own would have."""
    assert [1, "measured"] in told["trials"]


def test_main_is_never_imported_again(told: dict[str, Any]) -> None:
    """The program ran once, whatever was launched."""
    assert told["runs"] == ["__main__"]


def test_the_model_is_given_back(told: dict[str, Any]) -> None:
    """Its weights are as before, and no process is left to its owner."""
    assert told["was_kept"] is True
    assert told["children"] == []


def test_the_written_loop_trains_the_callers_model(told: dict[str, Any]) -> None:
    """`result.train()` returns the mean loss of each epoch, and it falls."""
    assert len(told["losses"]) == 3
    assert told["losses"][-1] < told["losses"][0]


def _from_file(folder: Path) -> str:
    (folder / "program.py").write_text(PROGRAM, "utf-8")
    return _checked(python("program.py", cwd=folder))


def _from_stdin(folder: Path) -> str:
    return _checked(python("-", cwd=folder, source=PROGRAM))


def _in_notebook(folder: Path) -> str:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    definitions, _, call = PROGRAM.partition("model = Net(16)")
    cells = [nbformat.v4.new_code_cell(text) for text in (definitions, f"model = Net(16){call}")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(folder)}})
    client.execute()
    printed = [each.text for each in notebook.cells[-1].outputs if each.get("name") == "stdout"]
    return "".join(printed)  # progress goes to stderr, before or after it


def _checked(ended: Ended) -> str:
    assert ended.code == 0, ended.stderr
    assert ended.left == []
    return ended.stdout
