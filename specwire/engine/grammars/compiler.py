"""Grammars of a service, each compiled once in a helper process; off event loop and engine thread."""

from __future__ import annotations

import importlib.util
import os
import pickle
import select
import subprocess
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from specwire import parent
from specwire.engine.grammars import helper
from specwire.engine.grammars.helper import GrammarVocabulary, Reply
from specwire.engine.grammars.matcher import GrammarMatcher
from specwire.errors import InvalidRequestError, ResourceExhaustedError, UnsupportedError
from specwire.text.grammar import Grammar
from specwire.text.token_texts import token_texts
from specwire.text.tokenizer import Tokenizer

_MAX_WAITING = 64
"""Grammars that wait to be compiled; one takes seconds at most."""
_MAX_KEPT = 256
_MAX_KEPT_BYTES = 1 << 28
_RETRY_AFTER_MS = 1000
_REPLY_S = 120.0
"""After which a helper hangs: importing xgrammar takes 4 s at worst, and a grammar 20 s at most."""


def vocabulary(
    tokenizer: Tokenizer | None, vocab_size: int, end_ids: tuple[int, ...]
) -> GrammarVocabulary | None:
    """What outputs can be constrained in; None without xgrammar, the tokens' texts or an end token."""
    if tokenizer is None or not end_ids or importlib.util.find_spec("xgrammar") is None:
        return None
    try:
        texts = token_texts(tokenizer)
    except UnsupportedError:
        return None
    texts = [None if token_id in end_ids else text for token_id, text in enumerate(texts[:vocab_size])]
    return GrammarVocabulary(texts, vocab_size, end_ids)


class Grammars:
    """Compiles grammars, and keeps those that were used last. For one event loop, but for `_compile`."""

    def __init__(self, known: GrammarVocabulary) -> None:
        """Nothing is started before the first grammar."""
        self._vocabulary = known
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._kept: OrderedDict[Grammar, Future[Any]] = OrderedDict()
        self._sizes: dict[Grammar, int] = {}
        self._num_open: Counter[Grammar] = Counter()
        self._helper: subprocess.Popen[bytes] | None = None
        self._info: Any = None

    def open(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher for one stream, which is ready when the grammar is compiled.

        Raises:
            ResourceExhaustedError: too many grammars wait to be compiled.
        """
        known = self._vocabulary
        matcher = GrammarMatcher(self._compiled(grammar), known.vocab_size, known.texts)
        self._num_open[grammar] += 1
        return matcher

    def close_stream(self, grammar: Grammar) -> None:
        """A stream that it was opened for ends: without any, a grammar that waits is not compiled."""
        self._num_open[grammar] -= 1
        if not self._num_open[grammar]:
            del self._num_open[grammar]
            waiting = self._kept.get(grammar)
            if waiting is not None and not waiting.done() and waiting.cancel():
                del self._kept[grammar]

    def _compiled(self, grammar: Grammar) -> Future[Any]:
        found = self._kept.get(grammar)
        if found is None or (found.done() and found.exception() is not None):
            if sum(not each.done() for each in self._kept.values()) > _MAX_WAITING:
                raise ResourceExhaustedError(f"{_MAX_WAITING} grammars wait to be compiled", _RETRY_AFTER_MS)
            found = self._kept[grammar] = self._thread.submit(self._compile, grammar)
        self._kept.move_to_end(grammar)
        self._forget()
        return found

    def _forget(self) -> None:
        """Drop the grammars that were used longest ago, while all together are too large."""
        done = [grammar for grammar, future in self._kept.items() if future.done()]
        sizes = {grammar: self._sizes.get(grammar, 0) for grammar in done}
        total = sum(sizes.values())
        for grammar, size in sizes.items():
            if total <= _MAX_KEPT_BYTES and len(self._kept) <= _MAX_KEPT:
                return
            del self._kept[grammar]
            self._sizes.pop(grammar, None)
            total -= size

    def close(self) -> None:
        """End the helper."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()

    # --- on a thread of its own ---

    def _compile(self, grammar: Grammar) -> Any:
        """Raises InvalidRequestError where it cannot be compiled, or takes too much."""
        import xgrammar

        if self._info is None:
            self._info = helper.tokenizer_info(self._vocabulary)
        kind, value = grammar.kind, getattr(grammar, grammar.kind)
        reply = self._ask(kind, value)
        if reply.problem:
            raise InvalidRequestError(f"grammar.{kind}", value, reply.problem)
        # `memory_size_bytes` leaves out the automata of rules, up to 30 times as much.
        self._sizes[grammar] = len(reply.compiled)
        return xgrammar.CompiledGrammar.deserialize_json(reply.compiled, self._info)

    def _ask(self, kind: str, value: Any) -> Reply:
        if self._helper is None or self._helper.poll() is not None:
            self._helper = self._started()
        process = self._helper
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((kind, value), process.stdin)
            process.stdin.flush()
            if select.select([process.stdout], [], [], _REPLY_S)[0]:
                reply: Reply = pickle.load(process.stdout)
                return reply
        except (OSError, EOFError):
            pass
        process.kill()
        process.wait()
        raise ResourceExhaustedError("the process that compiles grammars was lost", _RETRY_AFTER_MS)

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            parent.python("-c", f"from {helper.__name__} import main; main()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | parent.environment(),
            start_new_session=True,  # Ctrl-C must not reach it: streams that are drained may still need it
        )
        assert process.stdin is not None
        pickle.dump(self._vocabulary, process.stdin)
        process.stdin.flush()
        return process
