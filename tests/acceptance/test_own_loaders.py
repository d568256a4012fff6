"""`fit` on a `DataLoader` or a `Dataset` that a user has (DESIGN 2.1)."""

import json
from pathlib import Path
from typing import Any

import pytest

from acceptance.product import python

pytestmark = pytest.mark.slow

LIVE = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate

import autotune

class Samples(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, generator=generator)
        return inputs, (inputs.sum() > 0).long()

def collate(samples):
    inputs, targets = default_collate(samples)
    return inputs * 2, targets

def init(worker):
    torch.set_num_threads(1)

generator = torch.Generator()
sampler = WeightedRandomSampler([1.0] * 96, 96, generator=generator)
own = DataLoader(
    Samples(),
    batch_size=24,
    sampler=sampler,
    collate_fn=collate,
    drop_last=True,
    worker_init_fn=init,
    generator=generator,
)
model = nn.Linear(8, 2)
state = generator.get_state()
result = autotune.fit(
    model,
    {data},
    space={{"amp": ["off"], "threads": [1], {space}}},
    trials=14,
    time_budget="60s",
    progress=False,
    out="out",
)
is_generator_kept = bool(torch.equal(state, generator.get_state()))
loader = result.loader()
inputs, targets = next(iter(loader))
print(json.dumps({{
    "verdict": result.verdict,
    "config": result.config.to_dict(),
    "baseline": result.baseline.config.to_dict(),
    "trials": [trial.config.to_dict() for trial in result.trials],
    "outcomes": sorted({{trial.outcome.name for trial in result.trials}}),
    "first": len(inputs),
    "sampler": type(loader.sampler).__name__,
    "is_own_collate": loader.collate_fn is collate,
    "is_own_init": loader.worker_init_fn is init,
    "drop_last": loader.drop_last,
    "is_generator_kept": is_generator_kept,
    "report": open("out/report.md").read(),
}}))
"""


def fit_live(folder: Path, data: str, space: str = "") -> dict[str, Any]:
    """Run `fit` on live objects in a program of its own; return what it told."""
    ended = python("-", cwd=folder, source=LIVE.format(data=data, space=space))
    assert ended.code == 0, ended.stderr
    assert ended.left == []
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def of_loader(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `fit` makes of a user's own `DataLoader`."""
    folder = tmp_path_factory.mktemp("loader")
    return fit_live(folder, "own", '"batch_size": [6, 12, 24], "num_workers": [0, 1]')


def test_a_loader_of_ones_own_states_the_baseline(of_loader: dict[str, Any]) -> None:
    """Its batch size is the user's, whose effective batch is kept, and its workers too."""
    assert of_loader["baseline"]["batch_size"] == 24
    assert of_loader["baseline"]["num_workers"] == 0
    assert {_samples(config) for config in of_loader["trials"]} == {24}
    assert set(of_loader["outcomes"]) <= {"measured", "skipped"}
    assert {config["num_workers"] for config in of_loader["trials"]} == {0, 1}


def test_a_loader_of_ones_own_is_rebuilt_faithfully(of_loader: dict[str, Any]) -> None:
    """Sampler, collate_fn, drop_last and worker_init_fn are its own; the size is the answer's."""
    assert of_loader["first"] == of_loader["config"]["batch_size"]
    assert of_loader["sampler"] == "WeightedRandomSampler"
    assert of_loader["is_own_collate"]
    assert of_loader["is_own_init"]
    assert of_loader["drop_last"]


def test_a_loader_of_ones_own_is_given_back(of_loader: dict[str, Any]) -> None:
    """Its generator stands where it stood."""
    assert of_loader["verdict"] in {"tuned", "keep", "unconfirmed"}
    assert of_loader["is_generator_kept"]


def test_a_data_set_is_enough(tmp_path: Path) -> None:
    """`fit(model, dataset)` makes loaders of it, shuffled, of the size that is the answer."""
    told = fit_live(tmp_path, "Samples()")

    assert told["first"] == told["config"]["batch_size"] <= 96
    assert told["sampler"] == "RandomSampler"
    assert told["baseline"]["batch_size"] == 32


def test_what_only_a_gpu_has_is_not_offered_on_a_cpu(of_loader: dict[str, Any]) -> None:
    """Neither pinned memory nor cuDNN is tried, and the report has a line for each."""
    tried = {(config["pin_memory"], config["cudnn_benchmark"]) for config in of_loader["trials"]}

    lines = of_loader["report"].replace("\\", "").splitlines()  # as Markdown shows it
    assert tried == {(False, False)}
    assert [line for line in lines if "pin_memory" in line and "CUDA" in line]
    assert [line for line in lines if "cudnn_benchmark" in line and "CUDA" in line]


def _samples(config: dict[str, Any]) -> int:
    product: int = config["batch_size"] * config["accumulation_steps"]
    return product
