"""The examples keep the contract of a workload script, and what they say of themselves."""

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from autotune.facts import LOADER_SETTINGS
from autotune.workload import workload_of_module

EXAMPLES = Path(__file__).parent.parent / "examples"
IGNORED = -100


def load(name: str) -> ModuleType:
    """Return the example, read anew."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Loader workers and dataclasses look a module up by its name.
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="module")
def _plain_machine() -> Iterator[None]:
    """A machine without a GPU, and a user who named no text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.delenv("AUTOTUNE_TEXT", raising=False)
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


@pytest.fixture(name="bert", scope="module")
def fixture_bert(_plain_machine: None) -> ModuleType:
    """`examples/bert.py` on Python's own documentation; tests must not change it."""
    return load("bert")


@pytest.fixture(name="digits", scope="module")
def fixture_digits() -> ModuleType:
    """`examples/digits.py`."""
    return load("digits")


@pytest.fixture(name="use_text")
def fixture_use_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], ModuleType]:
    """A function that returns `examples/bert.py` on a text of the user's own."""

    def use_text(text: str) -> ModuleType:
        path = tmp_path / "own.txt"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv("AUTOTUNE_TEXT", str(path))
        return load("bert")

    return use_text


def forbid(*_args: object, **_kwargs: object) -> NoReturn:
    """Stand for what must not happen."""
    pytest.fail("an import must not do this")


def original_ids(dataset: object, index: int) -> list[int]:
    """Return the tokens of a sample before masking."""
    assert hasattr(dataset, "tokenizer")
    assert hasattr(dataset, "paragraphs")
    ids: list[int] = dataset.tokenizer.encode(dataset.paragraphs[index]).ids
    return ids


def samples_equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Whether token ids and labels are the same."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "digits"])
def test_import_is_idle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing builds no model, reads no data, starts no process and leaves the GPU asleep."""
    load(name)  # its libraries do such things once, when they are imported themselves
    monkeypatch.setattr(nn.Module, "__init__", forbid)
    monkeypatch.setattr(DataLoader, "__init__", forbid)
    monkeypatch.setattr(tokenizers.BertWordPieceTokenizer, "__init__", forbid)
    monkeypatch.setattr(datasets, "load_digits", forbid)
    monkeypatch.setattr(torch.cuda, "is_available", forbid)
    monkeypatch.setattr(os, "fork", forbid)
    monkeypatch.setattr(subprocess, "Popen", forbid)

    assert callable(load(name).model_fn)


@pytest.mark.parametrize("name", ["bert", "digits"])
def test_loader_settings(name: str, request: pytest.FixtureRequest) -> None:
    """`loader_fn` accepts the five settings, and the loader has what was asked for."""
    script = request.getfixturevalue(name)
    asked = dict(zip(LOADER_SETTINGS, (7, 2, 4, True, True), strict=True))

    loader = script.loader_fn(**asked)

    assert tuple(inspect.signature(script.loader_fn).parameters) == LOADER_SETTINGS
    assert {setting: getattr(loader, setting) for setting in LOADER_SETTINGS} == asked


@pytest.mark.parametrize(
    ("name", "options"),
    [("bert", {"global_batch": 32, "time_budget": "3min"}), ("digits", {"time_budget": "30s"})],
)
def test_contract(name: str, options: dict[str, object], request: pytest.FixtureRequest) -> None:
    """Each states a batch of 32 and its budget, and leaves loss and optimizer to the defaults."""
    workload = workload_of_module(request.getfixturevalue(name))

    assert workload.stated_batch_size() == 32
    assert workload.options == options
    assert workload.eval_loader_fn is not None
    assert (workload.loss_fn, workload.optimizer_fn, workload.batch_size_fn) == (None, None, None)


# --- bert: the text -------------------------------------------------------------------------------


def test_text_is_split(bert: ModuleType) -> None:
    """Every tenth paragraph is evaluated on, all others are trained on, none is both."""
    training = bert.loader_fn().dataset.paragraphs
    evaluation = bert.eval_loader_fn().dataset.paragraphs

    assert len(training) > 2000
    assert len(evaluation) == -(-len(bert.read_paragraphs()) // 10)
    assert sorted(training + evaluation) == sorted(bert.read_paragraphs())


def test_vocabulary_is_deterministic(bert: ModuleType) -> None:
    """Two trainings give each word piece the same number, so launches see the same batches."""
    again = load("bert")

    assert again.train_tokenizer() is not bert.train_tokenizer()
    assert again.train_tokenizer().get_vocab() == bert.train_tokenizer().get_vocab()


def test_special_tokens(bert: ModuleType) -> None:
    """The numbers that padding and masking use are those of the vocabulary."""
    vocabulary = bert.train_tokenizer().get_vocab()

    assert (vocabulary["[PAD]"], vocabulary["[MASK]"]) == (bert.PAD, bert.MASK)
    assert len(vocabulary) <= bert.MINI.vocab_size


def test_own_text(use_text: Callable[[str], ModuleType]) -> None:
    """AUTOTUNE_TEXT replaces text and vocabulary; what has no letter or digit is no paragraph."""
    bert = use_text("Bäume\nrauschen.\n\n---\n\n" + "\n \n".join(f"Satz {i}" for i in range(19)))

    batch = next(iter(bert.loader_fn()))

    assert bert.read_paragraphs()[:2] == ["Bäume\nrauschen.", "Satz 0"]
    assert batch["input_ids"].shape[0] == 18
    assert "[UNK]" not in bert.train_tokenizer().encode("baume rauschen satz").tokens


def test_many_letters(use_text: Callable[[str], ModuleType]) -> None:
    """A script of thousands of letters stays within the model's vocabulary, and deterministic."""
    text = "\n\n".join(" ".join(map(chr, range(0x4E00, 0x4E00 + n))) for n in range(100, 3000, 99))
    once, again = use_text(text), use_text(text)

    vocabulary = once.train_tokenizer().get_vocab()

    assert max(vocabulary.values()) < once.MINI.vocab_size
    assert vocabulary == again.train_tokenizer().get_vocab()


def test_own_text_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that leads nowhere is named, together with the variable it came from."""
    monkeypatch.setenv("AUTOTUNE_TEXT", "nowhere.txt")

    with pytest.raises(FileNotFoundError, match=r"AUTOTUNE_TEXT names 'nowhere\.txt'"):
        load("bert").loader_fn()


def test_own_text_is_too_short(use_text: Callable[[str], ModuleType]) -> None:
    """A text of too few paragraphs is refused, and says how paragraphs are told apart."""
    bert = use_text("one\ntwo\n\nthree")

    with pytest.raises(ValueError, match=r"at least 10 paragraphs with a blank line .* has 2"):
        bert.loader_fn()


def test_documentation_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without its documentation asks for a text of the user's own."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)

    with pytest.raises(FileNotFoundError, match="set AUTOTUNE_TEXT to the path"):
        load("bert").loader_fn()


# --- bert: masking and padding --------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(epoch=st.integers(0, 10**6), index=st.integers(0, 2000))
def test_masking_law(bert: ModuleType, epoch: int, index: int) -> None:
    """Labels hold 15 % of a paragraph's tokens, at least one; all else is as it was, and -100."""
    dataset = bert.loader_fn().dataset
    dataset.set_epoch(epoch)
    original = torch.tensor(original_ids(dataset, index))

    token_ids, labels = dataset[index]

    is_chosen = labels != IGNORED
    assert int(is_chosen.sum()) == max(1, round(0.15 * (len(original) - 2)))
    assert not is_chosen[[0, -1]].any()
    assert torch.equal(labels[is_chosen], original[is_chosen])
    assert torch.equal(token_ids[~is_chosen], original[~is_chosen])


def test_masking_shares(bert: ModuleType) -> None:
    """Of the chosen tokens about 80 % become [MASK], and about 10 % stay."""
    dataset = bert.loader_fn().dataset
    samples = [dataset[index] for index in range(600)]
    token_ids, labels = (torch.cat(parts) for parts in zip(*samples, strict=True))
    is_chosen = labels != IGNORED

    masked = (token_ids[is_chosen] == bert.MASK).float().mean()
    kept = (token_ids[is_chosen] == labels[is_chosen]).float().mean()

    assert masked.item() == pytest.approx(0.8, abs=0.03)
    assert kept.item() == pytest.approx(0.1, abs=0.03)


@settings(deadline=None, max_examples=25)
@given(epoch=st.integers(0, 1000), index=st.integers(0, 2000), noise=st.integers(0, 1000))
def test_masks_repeat(bert: ModuleType, epoch: int, index: int, noise: int) -> None:
    """The mask of (epoch, index) is the same whatever was read before, by whichever data set."""
    fresh, used = bert.loader_fn().dataset, bert.loader_fn().dataset
    for dataset in (fresh, used):
        dataset.set_epoch(epoch)
    torch.manual_seed(noise)

    _ = used[noise]

    assert samples_equal(used[index], fresh[index])


def test_masks_spare_global_randomness(bert: ModuleType) -> None:
    """Reading samples draws nothing from PyTorch's or NumPy's global generators."""
    dataset = bert.loader_fn().dataset
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002

    _ = [dataset[index] for index in range(20)]

    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state(legacy=False)["state"]["pos"] == before[1]  # noqa: NPY002


@pytest.mark.parametrize("what", ["epoch", "seed"])
def test_masks_change(bert: ModuleType, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another epoch, or another seed, masks other tokens of most paragraphs."""
    dataset = bert.loader_fn().dataset
    before = [dataset[index] for index in range(50)]

    dataset.set_epoch(int(what == "epoch"))
    monkeypatch.setattr(bert, "SEED", int(what == "seed"))
    after = [dataset[index] for index in range(50)]

    assert sum(map(samples_equal, before, after)) < 20


def test_batches_are_padded_to_their_longest(bert: ModuleType) -> None:
    """A batch is as wide as its longest paragraph: widths differ, none is over 64 tokens."""
    loader = bert.loader_fn(batch_size=4)

    batches = list(islice(loader, 50))

    widths = [batch["input_ids"].shape[1] for batch in batches]
    assert widths == [int(batch["attention_mask"].sum(dim=1).max()) for batch in batches]
    assert len(set(widths)) > 5
    assert max(widths) == 64


def test_padding_is_ignored(bert: ModuleType) -> None:
    """Padding is [PAD], is not attended to, and has no label."""
    short, long = torch.tensor([2, 4, 3]), torch.tensor([2, 9, 4, 9, 3])

    batch = bert.pad_batch([(short, torch.where(short == 4, 7, IGNORED)), (long, long)])

    assert batch["input_ids"].tolist() == [[2, 4, 3, 0, 0], [2, 9, 4, 9, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"][0].tolist() == [IGNORED, 7, IGNORED, IGNORED, IGNORED]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_follow_the_epoch(bert: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """Workers that live on mask as the new epoch says, and the tokenizer does not complain."""
    dataset = bert.loader_fn().dataset
    loader = DataLoader(
        dataset, batch_size=4, collate_fn=bert.pad_batch, num_workers=1, persistent_workers=True
    )

    for epoch in range(2):
        dataset.set_epoch(epoch)
        expected = bert.pad_batch([dataset[index] for index in range(4)])

        assert torch.equal(next(iter(loader))["labels"], expected["labels"])
    assert capfd.readouterr().err == ""


# --- bert: the model ------------------------------------------------------------------------------


@pytest.mark.slow
def test_model_learns(bert: ModuleType) -> None:
    """The model's own loss falls within a few steps of AdamW at its defaults."""
    torch.manual_seed(0)
    model = bert.model_fn()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []

    for batch in islice(bert.loader_fn(batch_size=4), 10):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert sum(losses[-3:]) < sum(losses[:3]) - 1


def test_gpu_gets_bert_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU the model is BERT-base, and reads up to 512 tokens."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    bert = load("bert")

    with torch.device("meta"):
        model = bert.model_fn()
    dataset = bert.loader_fn().dataset
    longest = dataset.paragraphs.index(max(dataset.paragraphs, key=len))

    assert sum(each.numel() for each in model.parameters()) == 109_514_298
    assert len(dataset[longest][0]) == 512


# --- digits ---------------------------------------------------------------------------------------


def test_digits_are_split(digits: ModuleType) -> None:
    """Four images in five are trained on, and the pixels lie within 0 and 1."""
    images, targets = next(iter(digits.loader_fn(batch_size=1797)))
    eval_images, _ = next(iter(digits.eval_loader_fn(batch_size=1797)))

    assert (len(images), len(eval_images)) == (1437, 360)
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert set(targets.tolist()) == set(range(10))


def test_digits_are_learned(digits: ModuleType) -> None:
    """One epoch of AdamW at its defaults recognises most digits it has not seen."""
    torch.manual_seed(0)
    model = digits.model_fn()
    optimizer = torch.optim.AdamW(model.parameters())
    for images, targets in digits.loader_fn():
        cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    images, targets = next(iter(digits.eval_loader_fn(batch_size=360)))

    correct = (model(images).argmax(dim=1) == targets).float().mean()

    assert correct.item() > 0.9


def test_splitting_digits_is_exact(digits: ModuleType) -> None:
    """Two halves of a batch give the outputs of the whole: no layer mixes samples."""
    torch.manual_seed(0)
    model = digits.model_fn()
    images, _ = next(iter(digits.loader_fn()))

    halves = torch.cat([model(half) for half in images.chunk(2)])

    torch.testing.assert_close(halves, model(images))
