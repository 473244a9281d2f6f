"""What `--speculative-config` says, under vLLM's names: drafts from text, or how the draft model drafts."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specwire.config.fields import check
from specwire.config.own_methods import DRAFT_MODEL, HEADS, OWN, OWN_METHODS
from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_TREE_NODES

NGRAM = "ngram"
SUFFIX = "suffix"
BEAMS = "num_beams"
"""Source of draft tokens after live beams: a token is accepted where a step of all beams needed no pass."""
KSEQ = "kseq"
"""k-SEQ, a selection."""
MODEL = "model"
"""What a request calls the draft model, whatever its name and wherever it runs."""
COUNTS = {"unigram": 1, "bigram": 2, "trigram": 3}
"""Methods that count n-grams, with their n."""
METHODS = (NGRAM, SUFFIX, *COUNTS)
"""Sources of drafts that need no model."""
OFFERED = (*METHODS, DRAFT_MODEL, *OWN)
"""Methods that a speculative config may name."""
GRAMMAR = "grammar"
"""Source of what the grammar of a request leaves no choice about; no method that can be chosen."""
FROM_TEXT = (*METHODS, GRAMMAR)
"""Sources of proposals that no model makes."""
INNER_METHODS = (NGRAM, SUFFIX)
"""What may guess a draft's tokens, besides a smaller model."""
ABOVE = ">"
"""Between an inner drafter and the draft whose tokens it guesses."""
MAX_PROMPT_LOOKUP = 32
MAX_CORPUS_BYTES = 4 << 20
_FLAG = "speculative_config"
_LOOKUP_KEYS = ("prompt_lookup_min", "prompt_lookup_max")


def _check_method(method: object, possible: Collection[str]) -> None:
    check(method in possible, _FLAG, f"method={method!r}", f"is not one of {', '.join(OFFERED)}")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """One method of drafting from text, and its settings.

    Attributes:
        method: one of METHODS.
        num_speculative_tokens: most draft tokens a round.
        prompt_lookup_min, prompt_lookup_max: length of the last tokens that are looked for, in tokens; of
            `ngram` and `suffix`.
        corpus: text file to count in, at most MAX_CORPUS_BYTES; empty for the target's own output. Of
            `unigram`, `bigram` and `trigram`.
    """

    method: str = NGRAM
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 16
    corpus: str = ""

    def __post_init__(self) -> None:
        _check_method(self.method, METHODS)
        least = {"prompt_lookup_max": self.prompt_lookup_min}
        most = {"num_speculative_tokens": MAX_NUM_DRAFT_TOKENS}
        for name in ("num_speculative_tokens", *_LOOKUP_KEYS):
            value, low, high = getattr(self, name), least.get(name, 1), most.get(name, MAX_PROMPT_LOOKUP)
            ok = type(value) is int and low <= value <= high
            check(ok, _FLAG, f"{name}={value!r}", f"must be a whole number in [{low}, {high}]")
        check(isinstance(self.corpus, str), _FLAG, f"corpus={self.corpus!r}", "is not the name of a file")
        there = not self.corpus or Path(self.corpus).is_file()
        check(there, _FLAG, f"corpus={self.corpus!r}", "no such file")
        num_bytes = Path(self.corpus).stat().st_size if self.corpus else 0
        over = f"has {num_bytes} bytes, over the limit of {MAX_CORPUS_BYTES}"
        check(num_bytes <= MAX_CORPUS_BYTES, _FLAG, f"corpus={self.corpus!r}", over)


@dataclass(frozen=True, kw_only=True)
class ModelDraftConfig:
    """How the draft model drafts, for requests that do not say.

    Attributes:
        method: `draft_model`.
        num_speculative_tokens: draft tokens a round; None finds out what pays.
        max_depth: longest path of a tree of so many; 0 for chains, None finds out what pays.
        use_heterogeneous_vocab: use a draft whose tokenizer is not the target's.
        selection: `kseq` to draw several chains where tokens are sampled; empty to draw one.
        num_chains: of such a selection, in each round.
    """

    method: str = DRAFT_MODEL
    num_speculative_tokens: int | None = None
    max_depth: int | None = None
    use_heterogeneous_vocab: bool = False
    selection: str = ""
    num_chains: int = 4

    def __post_init__(self) -> None:
        for name, low in (("num_speculative_tokens", 1), ("max_depth", 0)):
            value = getattr(self, name)
            ok = value is None or (type(value) is int and low <= value <= MAX_NUM_DRAFT_TOKENS)
            problem = f"must be a whole number in [{low}, {MAX_NUM_DRAFT_TOKENS}]"
            check(ok, _FLAG, f"{name}={value!r}", problem)
        given = self.use_heterogeneous_vocab
        check(isinstance(given, bool), _FLAG, f"use_heterogeneous_vocab={given!r}", "must be true or false")
        self._check_selection()

    def _check_selection(self) -> None:
        name, num_chains = f"selection={self.selection!r}", self.num_chains
        check(self.selection in ("", KSEQ), _FLAG, name, f"is not {KSEQ}")
        if not self.selection:
            is_default = num_chains == ModelDraftConfig.num_chains
            check(is_default, _FLAG, f"num_chains={num_chains!r}", f"is of selection {KSEQ} only")
            return
        most = MAX_TREE_NODES // (self.num_speculative_tokens or 1)
        ok = type(num_chains) is int and 1 <= num_chains <= most
        problem = f"must be a whole number in [1, {most}]: {MAX_TREE_NODES} draft tokens a round at most"
        check(ok, _FLAG, f"num_chains={num_chains!r}", problem)
        check(self.method == DRAFT_MODEL, _FLAG, name, f"is of method {DRAFT_MODEL} only")
        check(not self.max_depth, _FLAG, name, "does not combine with max_depth: its chains are no tree")
        problem = "does not combine with use_heterogeneous_vocab"
        check(not self.use_heterogeneous_vocab, _FLAG, name, problem)


@dataclass(frozen=True, kw_only=True)
class OwnDraftConfig(ModelDraftConfig):
    """How the target drafts for itself, for requests that do not say.

    Attributes:
        method: one of OWN.
        model: directory of the heads, the block drafter or the EAGLE-3, or what `--layers` takes; empty where
            the verify service is told by its own flag.
    """

    method: str = HEADS
    model: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        method, model = self.method, self.model
        check(isinstance(model, str), _FLAG, f"model={model!r}", "is not a text")
        own = OWN_METHODS[self.source]
        check(own.argument != "" or not model, _FLAG, f"model={model!r}", f"method {method} needs none")
        problem = f"does not combine with method {method}, which drafts chains"
        check(own.has_trees or not self.max_depth, _FLAG, f"max_depth={self.max_depth!r}", problem)
        name = f"use_heterogeneous_vocab={self.use_heterogeneous_vocab!r}"
        problem = f"does not combine with method {method}, which has the target's vocabulary"
        check(not self.use_heterogeneous_vocab, _FLAG, name, problem)

    @property
    def source(self) -> str:
        """Of its proposals: one of OWN_METHODS."""
        return OWN[self.method]


_CONFIGS = {DRAFT_MODEL: ModelDraftConfig, **dict.fromkeys(OWN, OwnDraftConfig)}


def parse_speculative_config(text: str) -> SpeculativeConfig | ModelDraftConfig | None:
    """A JSON object; None for an empty text. ConfigError names what is unknown: the method, a value, or a key
    that the method does not have."""
    if not text:
        return None
    try:
        given: Any = json.loads(text)
    except ValueError:
        given = None
    check(isinstance(given, dict), _FLAG, text, "is not a JSON object")
    method = given.get("method", NGRAM)
    _check_method(method, OFFERED)
    known = ["method", "num_speculative_tokens", *(["corpus"] if method in COUNTS else _LOOKUP_KEYS)]
    if method in _CONFIGS:
        known = [field.name for field in fields(_CONFIGS[method])]
    for key in given:
        problem = f"is not a key of method {method}; known are {', '.join(known)}"
        check(key in known, _FLAG, f"{key}={given[key]!r}", problem)
    return _CONFIGS.get(method, SpeculativeConfig)(**given)
