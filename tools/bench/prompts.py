"""The prompts of a benchmark: from a file, random tokens, or a few built-in beginnings of programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specwire.core import ModelInfo
from specwire.errors import ConfigError
from tools.files import read_text

BUILT_IN = (
    "def fibonacci(n):\n    ",
    'class LinkedList:\n    """A singly linked list."""\n\n    def __init__(self):\n        ',
    "import json\nimport sys\n\n\ndef main(argv):\n    ",
    'def read_lines(path):\n    """Yield the lines of a file without their ends."""\n    ',
    "import unittest\n\n\nclass QueueTest(unittest.TestCase):\n    def test_empty(self):\n        ",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    ",
)
_KEYS = ("prompt", "prompt_token_ids", "max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, as text or as token ids; its own `max_tokens` overrides that of the command line."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None


def read(path: Path, flag: str = "--prompts") -> list[Prompt]:
    """Prompts of a file: JSON lines when the first line is a JSON object, else one prompt a line as text.

    Empty lines are skipped.

    Args:
        flag: that names the file.

    Raises:
        ConfigError: naming the file and the line.
    """
    text = read_text(flag, path)
    # Not splitlines(): a prompt may hold a form feed or U+2028.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{flag} {path}: holds no prompt")
    if _object(lines[0][1]) is None:
        return [Prompt(text=line.removesuffix("\r")) for _, line in lines]
    return [_parsed(line, f"{flag} {path}, line {n}") for n, line in lines]


def built_in(target: ModelInfo) -> list[Prompt]:
    """The built-in prompts; for a target without a tokenizer, their bytes stand for token ids."""
    if target.tokenizer_fingerprint:
        return [Prompt(text=text) for text in BUILT_IN]
    return [Prompt(token_ids=tuple(byte % target.vocab_size for byte in text.encode())) for text in BUILT_IN]


def _object(line: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parsed(line: str, where: str) -> Prompt:
    fields = _object(line)
    if fields is None:
        raise ConfigError(f"{where}: is not a JSON object, unlike the first line")
    unknown = sorted(set(fields) - set(_KEYS))
    if unknown:  # a misspelt key must not fall back to the default
        raise ConfigError(f"{where}: {unknown[0]!r} is not one of {', '.join(_KEYS)}")
    text, token_ids, max_tokens = (fields.get(key) for key in _KEYS)
    if (text is None) == (token_ids is None):
        raise ConfigError(f"{where}: needs either prompt or prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{where}: prompt is not text")
    if token_ids is not None and not _are_counts(token_ids, 0):
        raise ConfigError(f"{where}: prompt_token_ids is not a list of token ids")
    if max_tokens is not None and not _are_counts([max_tokens], 1):
        raise ConfigError(f"{where}: max_tokens must be a whole number, at least 1")
    return Prompt(text=text, token_ids=None if token_ids is None else tuple(token_ids), max_tokens=max_tokens)


def _are_counts(values: object, least: int) -> bool:
    """Whether this is a list of whole numbers, each at least `least`."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= least for v in values)


def random_tokens(
    num_prompts: int, num_tokens: int, max_tokens: int, vocab_size: int, seed: int
) -> list[Prompt]:
    """Prompts of tokens drawn uniformly from the vocabulary."""
    drawn = np.random.default_rng(seed).integers(vocab_size, size=(num_prompts, num_tokens))
    return [Prompt(token_ids=tuple(token_ids), max_tokens=max_tokens) for token_ids in drawn.tolist()]


def sharegpt(path: Path, num_prompts: int, seed: int) -> list[Prompt]:
    """First turns of conversations that have an answer, in a random order, as vLLM's benchmark takes them.

    Raises:
        ConfigError: it is not ShareGPT's JSON, or has none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        turns: list[Any] = [one.get("conversations") or one.get("conversation") or [] for one in found]
        texts = [each[0]["value"] for each in turns if len(each) >= 2]
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"--dataset-path {path}: is not ShareGPT's JSON ({error})") from None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"--dataset-path {path}: has no conversation of two turns, or an empty turn")
    order = np.random.default_rng(seed).permutation(len(texts))
    return [Prompt(text=texts[i]) for i in order[:num_prompts]]
