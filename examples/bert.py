"""BERT masked-language modelling on real text: `python -m autotune examples/bert.py`.

Nothing is downloaded: the text is Python's own reference documentation, and the vocabulary is
trained on it. For your own text, with a blank line between paragraphs, set `AUTOTUNE_TEXT` to the
path of a file. On a CPU the model is BERT-mini; where there is a GPU it is BERT-base.
"""

import functools
import importlib
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

# --- settings -------------------------------------------------------------------------------------

autotune_options = {
    "global_batch": 32,  # samples of every optimizer step: the tuner must not change it
    "time_budget": "3min",  # how long the tuner may search
}
SEED = 0  # of the masks; with the same seed, epoch and sample a mask is the same
MASKED_SHARE = 0.15  # of a paragraph's tokens; this and the next as in arXiv:1810.04805
MASKED_AS = (0.8, 0.1, 0.1)  # shares of these that become [MASK], any token, stay as they are
EVAL_EVERY = 10  # every tenth paragraph is kept for evaluation
VOCABULARY_PARAGRAPHS = 10_000  # the vocabulary is trained on so many, however long the text is
MOST_LETTERS = 1000  # the commonest of the text; words with a rarer one become [UNK]
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, MASK, IGNORED = 0, 4, -100  # the loss leaves out labels of -100

# Both read at most `max_position_embeddings` tokens of a paragraph.
MINI = BertConfig(  # arXiv:1908.08962
    num_hidden_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    intermediate_size=1024,
    max_position_embeddings=64,
    vocab_size=4096,
)
BASE = BertConfig()  # 12 layers, hidden size 768, 512 tokens, 30,522 word pieces

# --- set-up ---------------------------------------------------------------------------------------

# A tokenizer with threads of its own would not survive the fork of a loader worker.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def bert_config() -> BertConfig:
    """Return the size of BERT for this machine; asked late, since the question wakes the GPU."""
    return BASE if torch.cuda.is_available() else MINI


def read_text() -> str:
    """Return the user's text, or else Python's reference documentation.

    Raises:
        FileNotFoundError: If neither is there.
    """
    path = os.environ.get("AUTOTUNE_TEXT")
    if path:
        if not Path(path).is_file():
            raise FileNotFoundError(f"AUTOTUNE_TEXT names {path!r}, but there is no such file")
        return Path(path).read_text(encoding="utf-8")
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as missing:
        raise FileNotFoundError(
            "this Python comes without the documentation of pydoc_data.topics, the text of this "
            "example; set AUTOTUNE_TEXT to the path of a text file of your own"
        ) from missing
    return "\n\n".join(topics.values())


@functools.cache
def read_paragraphs() -> list[str]:
    """Return the paragraphs of the text that hold at least one letter or digit.

    Raises:
        ValueError: If there are too few of them to keep some for evaluation.
    """
    paragraphs = [part for part in re.split(r"\n\s*\n", read_text()) if re.search(r"\w", part)]
    if len(paragraphs) < EVAL_EVERY:
        raise ValueError(
            f"the text needs at least {EVAL_EVERY} paragraphs with a blank line between them, "
            f"but it has {len(paragraphs)}"
        )
    return paragraphs


@functools.cache
def train_tokenizer() -> BertWordPieceTokenizer:
    """Return a WordPiece tokenizer trained on the text, the same one in every process."""
    paragraphs = read_paragraphs()[:VOCABULARY_PARAGRAPHS]
    learner = BertWordPieceTokenizer()
    common = "".join(letter for letter, _ in Counter("".join(paragraphs)).most_common(MOST_LETTERS))
    letters = sorted(set(learner.normalize(common)) - {" "})
    learner.train_from_iterator(
        paragraphs,
        vocab_size=bert_config().vocab_size,
        # Letters that the trainer finds by itself are numbered in random order, and ties between
        # word pieces are broken by number: then no two launches would see the same tokens.
        special_tokens=[*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)],
        limit_alphabet=0,
        show_progress=False,
    )
    tokenizer = BertWordPieceTokenizer(learner.get_vocab())
    tokenizer.enable_truncation(bert_config().max_position_embeddings)
    return tokenizer


class MaskedParagraphs(Dataset[tuple[Tensor, Tensor]]):
    """Paragraphs as (token ids, labels), masked anew in every epoch."""

    def __init__(self, paragraphs: list[str]) -> None:
        self.paragraphs = paragraphs
        self.tokenizer = train_tokenizer()
        # Shared memory, so that loader workers that live on learn of the next epoch too.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the masks; the training loop calls this before each epoch."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.paragraphs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        token_ids = np.array(self.tokenizer.encode(self.paragraphs[index]).ids)
        # Nothing else decides, so that a resumed run sees the masks it would have seen.
        random = np.random.default_rng((SEED, int(self.epoch), index))
        # Without [CLS] and [SEP] at the ends; at least one, since a mean over no label is NaN.
        count = max(1, round(MASKED_SHARE * (len(token_ids) - 2)))
        chosen = 1 + random.choice(len(token_ids) - 2, size=count, replace=False)
        labels = np.full_like(token_ids, IGNORED)
        labels[chosen] = token_ids[chosen]
        any_token = random.integers(len(SPECIAL_TOKENS), self.tokenizer.get_vocab_size(), count)
        fate = random.choice(len(MASKED_AS), size=count, p=MASKED_AS)
        token_ids[chosen] = np.select([fate == 0, fate == 1], [MASK, any_token], token_ids[chosen])
        return torch.from_numpy(token_ids), torch.from_numpy(labels)


def pad_batch(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return a batch as long as its longest sample, and no longer."""
    input_ids = pad_sequence([ids for ids, _ in samples], batch_first=True, padding_value=PAD)
    labels = [labels for _, labels in samples]
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


# --- what is tuned --------------------------------------------------------------------------------


def model_fn() -> nn.Module:
    """Return the model. Called with `labels` it computes its own loss: no `loss_fn` is needed."""
    return BertForMaskedLM(bert_config())


def loader_fn(
    batch_size: int = 32,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    pin_memory: bool = False,
    persistent_workers: bool = False,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the training batches; the defaults are the settings that the tuner is to beat."""
    paragraphs = read_paragraphs()
    return DataLoader(
        MaskedParagraphs([p for i, p in enumerate(paragraphs) if i % EVAL_EVERY]),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=pad_batch,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
    )


def eval_loader_fn(batch_size: int = 32) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the paragraphs kept for evaluation; their masks never change."""
    paragraphs = read_paragraphs()[::EVAL_EVERY]
    return DataLoader(MaskedParagraphs(paragraphs), batch_size=batch_size, collate_fn=pad_batch)
