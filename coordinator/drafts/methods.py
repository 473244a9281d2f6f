"""The methods by name, and what their drafters share: a corpus, and outputs of earlier generations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from coordinator.drafts.counts import CountedOutput, Table
from coordinator.drafts.own import Forced
from coordinator.drafts.text import Method, TextDrafter
from coordinator.generation import Drafter
from coordinator.peers.verifier import RemoteVerifier
from coordinator.requests import GenerationRequest
from specwire.config.speculative import COUNTS, GRAMMAR, NGRAM, SUFFIX, SpeculativeConfig
from specwire.errors import ConfigError
from specwire.proposals.history import MAX_CONTINUATIONS, NO_TOKENS, Guess, History, TokenArray
from specwire.text.tokenizer import Tokenizer

_MAX_CORPUS_TOKENS = 1 << 20
MAX_SCOPES = 128
MAX_TOKENS = 16_384
"""Of a scope; a look-up takes time with them."""
MAX_BYTES = MAX_SCOPES * MAX_TOKENS * 4


class Occurrences:
    """A `text.Method`: what followed earlier occurrences of the last tokens. Of the longest match `ngram`
    takes what followed last, `suffix` what most share.

    Sources: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding); n-gram
    drafts are in Leviathan et al. 2023 (arXiv 2211.17192), section 4.1, already. Oliaro et al. 2024,
    SuffixDecoding (arXiv 2411.04975), whose suffix tree gives, for the longest match, how often each
    continuation occurred; here the occurrences are found by comparing all tokens at once, and are counted as
    the path goes on.
    """

    def __init__(self, config: SpeculativeConfig, earlier: TokenArray = NO_TOKENS) -> None:
        """`earlier` [num_tokens] are outputs of earlier generations."""
        self._history = History(config.prompt_lookup_min, config.prompt_lookup_max, earlier)
        self._num_counted = 1 if config.method == NGRAM else MAX_CONTINUATIONS

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        self._history.update(committed)
        return self._history.guess(num_tokens, self._num_counted)


class EarlierOutputs:
    """The latest outputs of each scope, oldest first; at most MAX_BYTES for tokens.

    A scope is the set of requests that may be drafted for from each other's outputs. A client sees rejected
    draft tokens, so a scope must not be wider than who may read the outputs. The least recently used scope
    goes first, and of a scope its oldest tokens.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, TokenArray] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Of all tokens that are kept."""
        return sum(tokens.nbytes for tokens in self._tokens.values())

    def of(self, scope: str | None) -> TokenArray:
        """[num_tokens] of a scope, never changed afterwards; none of None."""
        if scope is None or scope not in self._tokens:
            return NO_TOKENS
        self._tokens.move_to_end(scope)
        return self._tokens[scope]

    def add(self, scope: str | None, token_ids: Sequence[int]) -> None:
        """Append an output to a scope; None keeps nothing."""
        if scope is None or not token_ids:
            return
        new = np.array(token_ids[-MAX_TOKENS:], dtype=np.int32)
        self._tokens[scope] = np.concatenate([self.of(scope), new])[-MAX_TOKENS:].copy()
        self._tokens.move_to_end(scope)
        if len(self._tokens) > MAX_SCOPES:
            self._tokens.popitem(last=False)


class TextDrafts:
    """Makes drafters of every method, for all requests of a coordinator.

    Attributes:
        earlier: outputs of earlier generations, by the scope of their requests.
    """

    def __init__(self, config: SpeculativeConfig | None, tokenizer: Tokenizer | None) -> None:
        """Args:
        config: of one method; the others have their defaults.

        Raises:
            ConfigError: a corpus is no UTF-8 text, or there is no tokenizer for it.
        """
        self.earlier = EarlierOutputs()
        self._config = config or SpeculativeConfig()
        self._corpus = _count(self._config, tokenizer) if self._config.corpus else None

    def config(self, method: str) -> SpeculativeConfig:
        """Of a method; without one, that of the default."""
        return self._config if method in ("", self._config.method) else SpeculativeConfig(method=method)

    def drafter(self, request: GenerationRequest, model: Drafter) -> TextDrafter:
        """For a request whose draft is a method, alone or beside the model."""
        config, scope = self.config(request.draft.method), request.output_scope
        return TextDrafter(
            method=self._method(config, scope),
            model=model,
            source=config.method,
            matches_tokens=request.params.matches_tokens,
            is_fixed=request.num_draft_tokens is not None,
            remember=partial(self.earlier.add, scope),
        )

    @staticmethod
    def forced(request: GenerationRequest, others: Drafter, target: RemoteVerifier) -> TextDrafter:
        """For a request with a grammar, beside what else drafts for it."""
        return TextDrafter(
            method=Forced(target),
            model=others,
            source=GRAMMAR,
            matches_tokens=request.params.matches_tokens,
            is_fixed=request.num_draft_tokens is not None,
            is_certain=True,
        )

    def _method(self, config: SpeculativeConfig, scope: str | None) -> Method:
        if config.method == NGRAM:
            return Occurrences(config)
        if config.corpus and self._corpus is not None:
            return self._corpus
        earlier = self.earlier.of(scope)
        if config.method == SUFFIX:
            return Occurrences(config, earlier)
        return CountedOutput(COUNTS[config.method], earlier)


def _count(config: SpeculativeConfig, tokenizer: Tokenizer | None) -> Table:
    """The n-grams of the corpus."""
    if tokenizer is None:
        raise ConfigError(f"--speculative-config corpus={config.corpus!r}: the target has no tokenizer")
    try:
        text = Path(config.corpus).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--speculative-config corpus={config.corpus!r}: {error}") from None
    token_ids = tokenizer.encode(text)[:_MAX_CORPUS_TOKENS]
    return Table(COUNTS[config.method], np.array(token_ids, dtype=np.int32))
