"""The training text (this interpreter's standard library) and the tokenizer learned from it."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
MAX_CONTEXT = 2048
MEAN_PIECE_CHARS = 400

SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"})
# Character tables and generated build settings are Python only by name; the latter also hold local paths.
SKIPPED_PREFIXES = (
    "_sysconfigdata",
    "cp",
    "iso8859",
    "mac_",
    "koi8",
    "kz1048",
    "ptcp154",
    "hp_roman8",
    "tis_620",
)

# Indentation is a token of its own (so 4, 8 and 12 spaces are), newlines never merge with what follows, and
# a word takes at most the one space before it.
PATTERN = r"\n+|(?<=\n)[ \t]+| ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+|\s"
SPACES = r"[ \t]{2,}"


@dataclass(frozen=True)
class Document:
    """One source file: its path below the library's root, and its text."""

    path: str
    text: str


def read_library(root: Path | None = None) -> list[Document]:
    """Return the library's readable source files in path order."""
    base = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents = []
    for path in sorted(base.rglob("*.py")):
        relative = path.relative_to(base)
        if not _is_wanted(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            documents.append(Document(relative.as_posix(), text))
    return documents


def _is_wanted(relative: Path) -> bool:
    if SKIPPED_FOLDERS.intersection(relative.parts):
        return False
    is_table = relative.parts[0] == "encodings" and relative.name.startswith(SKIPPED_PREFIXES)
    return not is_table and not relative.name.startswith("_sysconfigdata")


def split(
    documents: Iterable[Document], *, held_out_percent: int = 5
) -> tuple[list[Document], list[Document]]:
    """Split by file into (train, held out); a hash of the path decides, so the split never moves."""
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        digest = hashlib.sha256(document.path.encode()).digest()
        side = held_out if int.from_bytes(digest[:4], "big") % 100 < held_out_percent else train
        side.append(document)
    return train, held_out


def train_tokenizer(documents: Iterable[Document]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of `VOCAB_SIZE` tokens in which every string round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{SPACES}|{PATTERN}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document], *, rng: random.Random | None
) -> list[int]:
    """Return one row of token ids, each document between end-of-text tokens.

    With `rng`, documents are cut at random places before encoding: a prompt may stop anywhere, for instance
    after a space, and the model must have seen the token boundaries that this makes.
    """
    ids: list[int] = [tokenizer.eos_token_id]
    for document in documents:
        pieces = _cut(document.text, rng) if rng is not None else iter([document.text])
        for piece in pieces:
            ids.extend(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        ids.append(tokenizer.eos_token_id)
    return ids


def _cut(text: str, rng: random.Random) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + 1 + int(rng.expovariate(1 / MEAN_PIECE_CHARS))
        yield text[start:end]
        start = end
