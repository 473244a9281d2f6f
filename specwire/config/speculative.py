"""What `--speculative-config` says, under vLLM's names: drafts from text, or how the draft model drafts."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specwire.config.fields import check
from specwire.config.flags import flag_name
from specwire.config.own_methods import DRAFT_MODEL, HEADS, OWN, OWN_METHODS
from specwire.config.pairs import without_repeats
from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_TREE_NODES
from specwire.errors import ConfigError

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


class _Keys:
    """Base of what a speculative config says of one method: errors name the key and its value."""

    def _check(self, ok: bool, name: str, problem: str) -> None:
        check(ok, _FLAG, f"{name}={getattr(self, name)!r}", problem)

    def _check_number(self, name: str, low: int, high: int, why: str = "") -> None:
        value = getattr(self, name)
        is_number = type(value) is int and low <= value <= high
        self._check(is_number, name, f"must be a whole number in [{low}, {high}]{why}")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(_Keys):
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
        self._check_number("num_speculative_tokens", 1, MAX_NUM_DRAFT_TOKENS)
        self._check_number("prompt_lookup_min", 1, MAX_PROMPT_LOOKUP)
        self._check_number("prompt_lookup_max", self.prompt_lookup_min, MAX_PROMPT_LOOKUP)
        self._check(isinstance(self.corpus, str), "corpus", "is not the name of a file")
        if self.corpus:
            self._check(Path(self.corpus).is_file(), "corpus", "no such file")
            num_bytes = Path(self.corpus).stat().st_size
            over = f"has {num_bytes} bytes, over the limit of {MAX_CORPUS_BYTES}"
            self._check(num_bytes <= MAX_CORPUS_BYTES, "corpus", over)


@dataclass(frozen=True, kw_only=True)
class ModelDraftConfig(_Keys):
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
            if getattr(self, name) is not None:
                self._check_number(name, low, MAX_NUM_DRAFT_TOKENS)
        is_switch = isinstance(self.use_heterogeneous_vocab, bool)
        self._check(is_switch, "use_heterogeneous_vocab", "must be true or false")
        self._check(self.selection in ("", KSEQ), "selection", f"is not {KSEQ}")
        if self.selection:
            self._check_selection()
        else:
            is_default = self.num_chains == ModelDraftConfig.num_chains
            self._check(is_default, "num_chains", f"is of selection {KSEQ} only")

    def _check_selection(self) -> None:
        most = MAX_TREE_NODES // (self.num_speculative_tokens or 1)
        self._check_number("num_chains", 1, most, f": {MAX_TREE_NODES} draft tokens a round at most")
        name = "selection"
        self._check(self.method == DRAFT_MODEL, name, f"is of method {DRAFT_MODEL} only")
        self._check(not self.max_depth, name, "does not combine with max_depth: its chains are no tree")
        problem = "does not combine with use_heterogeneous_vocab"
        self._check(not self.use_heterogeneous_vocab, name, problem)


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
        method, own = self.method, OWN_METHODS[self.source]
        self._check(isinstance(self.model, str), "model", "is not a text")
        self._check(own.argument != "" or not self.model, "model", f"method {method} needs none")
        problem = f"does not combine with method {method}, which drafts chains"
        self._check(own.has_trees or not self.max_depth, "max_depth", problem)
        problem = f"does not combine with method {method}, which has the target's vocabulary"
        self._check(not self.use_heterogeneous_vocab, "use_heterogeneous_vocab", problem)

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
        given: Any = json.loads(text, object_pairs_hook=without_repeats)
    except ConfigError as error:
        raise ConfigError(f"{flag_name(_FLAG)} {error}") from None
    except (ValueError, RecursionError):
        given = None
    check(isinstance(given, dict), _FLAG, text, "is not a JSON object")
    method = given.get("method", NGRAM)
    check(method in OFFERED, _FLAG, f"method={method!r}", f"is not one of {', '.join(OFFERED)}")
    known = ["method", "num_speculative_tokens", *(["corpus"] if method in COUNTS else _LOOKUP_KEYS)]
    if method in _CONFIGS:
        known = [field.name for field in fields(_CONFIGS[method])]
    for key in given:
        problem = f"is not a key of method {method}; known are {', '.join(known)}"
        check(key in known, _FLAG, f"{key}={given[key]!r}", problem)
    return _CONFIGS.get(method, SpeculativeConfig)(**given)
