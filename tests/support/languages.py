"""A regular language over tokens of several letters, and what may follow each beginning of its words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import regex
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.pairs import MARKOV_VOCAB_SIZE, markov_model
from tests.support.tiny_models import save

END_ID = 0
TEXTS = ("", "a", "b", "c", "d", "ab", "ba", "cd", "abc", "dc", "bab", "e", "ca", "aa", "cda", "db")
"""Of each token, by id; the first one ends a text."""
REGEX = "(ab|ba|cd?){12,16}"
"""What follows depends on more than the last token, and ends in several ways."""
FORCED = "((ab|c)dcabbacd){3,5}"
"""Most of its text is certain, but not how it is spelled."""


def allowed(output: Sequence[int], expression: str = REGEX) -> npt.NDArray[np.bool_]:
    """[vocab_size], which tokens may follow these: those with which a regular expression matches in part."""
    text = "".join(TEXTS[token_id] for token_id in output)
    fits = [regex.fullmatch(expression, text + more, partial=True) is not None for more in TEXTS]
    fits[END_ID] = regex.fullmatch(expression, text) is not None
    return np.array(fits)


def save_speaker(model: PreTrainedModel, directory: Path, texts: Sequence[str] = TEXTS) -> Path:
    """A Markov model with these tokens, of which the first is the end."""
    model.config.eos_token_id = model.generation_config.eos_token_id = END_ID
    table = {text or "<end>": token_id for token_id, text in enumerate(texts)}
    assert len(table) == MARKOV_VOCAB_SIZE
    backend = Backend(models.BPE(table, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(directory)
    return save(model, directory)


def save_speakers(directory: Path, scale: float, shift: int = 0) -> tuple[Path, Path]:
    """As `pairs.save_markov_pair`, with these tokens."""
    target = save_speaker(markov_model(), directory / "target")
    return target, save_speaker(markov_model(scale, shift), directory / "draft")
