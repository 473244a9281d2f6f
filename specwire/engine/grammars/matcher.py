"""Which tokens the grammar of a stream allows after the tokens of its output.

A function of these tokens alone: what a matcher keeps is where it was last, from where it goes back and on.
Masks are computed when the logits are decided on: on a GPU the pass runs meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from specwire.core import num_in_common
from specwire.errors import InvalidRequestError, ResourceExhaustedError, SpecwireError
from specwire.rule.columns import Bits
from specwire.text.grammar import LONGEST_MASK_S

_MASKS_S = 0.05
"""Processor time of the masks of a sequence in a pass, in seconds, which other sequences wait for too. One
takes some 10 us; where texts have many derivations it grows with the text."""
_NUM_SLOW = 3
"""Passes in a row over it, after which the sequence is ended: one may be the machine's fault."""
_MOST_SPELLINGS = 64
"""Tokens that one text begins with: no more than the longest token has characters."""
_WORD = 32


class GrammarMatcher:
    """Of one stream, its forks included. Engine thread only, and after the grammar was compiled.

    Args:
        vocab_size: width of the masks.
        texts: by token id; None where a token stands for no text.

    Attributes:
        compiled: the grammar; it may not be there yet.
    """

    def __init__(self, compiled: Future[Any], vocab_size: int, texts: Sequence[bytes | None]) -> None:
        self.compiled = compiled
        self._texts = texts
        self._num_words = -(-vocab_size // _WORD)
        self._matcher: Any = None
        self._output: list[int] = []
        self._num_slow, self._spent_s = 0, 0.0

    def fill(self, output: list[int], draft_token_ids: Sequence[int], parents: Sequence[int]) -> Bits:
        """The masks after the output, and after each draft token; empty where no token can follow.

        Args:
            output: all tokens after the prompt.
            parents: of the draft tokens in a tree; empty for a chain.

        Raises:
            InvalidRequestError: the grammar does not allow the output, or no token can follow it.
            ResourceExhaustedError: it takes too long.
        """
        started_s = time.thread_time() - self._spent_s
        self._spent_s = 0.0
        if self._move_to(output):
            found = self._after(draft_token_ids, parents)
        else:
            found = np.full((1 + len(draft_token_ids), self._num_words * _WORD // 8), 255, np.uint8)
        self._num_slow = self._num_slow + 1 if time.thread_time() - started_s > _MASKS_S else 0
        if self._num_slow == _NUM_SLOW:
            raise _too_slow()
        return found

    def forced(self, output: list[int], num_tokens: int) -> list[int]:
        """At most so many tokens of the text that must follow the output, the longest at each place; errors
        as of `fill`.

        xgrammar finds this text at once, and all of it: `(a{1000}){1000}` takes it 0.1 s.
        """
        started_s = time.thread_time()
        found: list[int] = []
        try:
            is_open = self._move_to(output)
            while is_open and len(found) < num_tokens:
                token_id = self._spelled(self._after((), ())[0])
                if token_id is None:
                    break
                self._matcher.accept_token(token_id)
                found.append(token_id)
                is_open = not self._matcher.is_terminated()
        finally:
            self._matcher.rollback(len(found))
            self._spent_s = time.thread_time() - started_s  # counts as that of the next masks
        return found

    def _spelled(self, mask: Bits) -> int | None:
        """The longest of the tokens that are allowed, if all others are beginnings of it."""
        bits = np.unpackbits(mask, count=len(self._texts), bitorder="little")
        if bits.sum() > _MOST_SPELLINGS:
            return None
        token_ids: list[int] = np.flatnonzero(bits).tolist()
        texts = [self._texts[token_id] or b"" for token_id in token_ids]
        longest = max(texts, key=len)
        is_one = len(texts) == 1 or all(text and longest.startswith(text) for text in texts)
        return token_ids[texts.index(longest)] if is_one else None

    def _move_to(self, output: list[int]) -> bool:
        """Go back to what is common, and on from there; returns whether the output is still open.

        Raises:
            InvalidRequestError: the grammar does not allow the output.
        """
        if self._matcher is None:
            import xgrammar

            self._matcher = xgrammar.GrammarMatcher(self.compiled.result())
        held = self._output
        num_common = len(held) if held == output[: len(held)] else num_in_common(held, output)
        if num_common < len(held):
            self._matcher.rollback(len(held) - num_common)
            del held[num_common:]
        for token_id in output[num_common:]:
            if self._matcher.is_terminated():
                return False  # what follows the end is never emitted
            if not self._matcher.accept_token(token_id):
                problem = f"does not match the grammar, as token {len(held)} of the output"
                raise InvalidRequestError("token_ids", token_id, problem)
            held.append(token_id)
        return not self._matcher.is_terminated()

    def _after(self, draft_token_ids: Sequence[int], parents: Sequence[int]) -> Bits:
        num_nodes = 1 + len(draft_token_ids)
        words = np.full((num_nodes, self._num_words), -1, np.int32)
        first, following = _links(parents, num_nodes)
        tokens = np.array([0, *draft_token_ids], np.int64)
        if not self._matcher.traverse_draft_tree(first, following, tokens, words, LONGEST_MASK_S):
            raise _too_slow()
        masks = words.view(np.uint8)
        is_empty = masks.max(axis=1) == 0
        if is_empty[0]:
            raise InvalidRequestError("grammar", "set", "no token of the vocabulary goes on with the output")
        # What follows an end is never emitted. Other empty masks stay: after a draft token that the grammar
        # does not allow, and cannot be accepted, or before what no token can spell.
        masks[is_empty & np.isin(tokens, self._matcher.stop_token_ids)] = 255
        return masks


def _too_slow() -> ResourceExhaustedError:
    return ResourceExhaustedError(f"the grammar takes more than {_MASKS_S:g} s a round to match")


def _links(parents: Sequence[int], num_nodes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each node, the prefix first: its first child, and the next child of its parent; -1 for none."""
    first, following = np.full(num_nodes, -1, np.int64), np.full(num_nodes, -1, np.int64)
    if not parents:
        first[:-1] = np.arange(1, num_nodes)
        return first, following
    for node in range(num_nodes - 1, 0, -1):
        parent = parents[node - 1] + 1
        following[node], first[parent] = first[parent], node
    return first, following


class LazyMasks:
    """The masks of one sequence in a pass, computed when they are first read; `error` says then why there are
    none. Arguments as of `GrammarMatcher.fill`."""

    def __init__(
        self,
        matcher: GrammarMatcher,
        output: list[int],
        draft_token_ids: Sequence[int],
        parents: Sequence[int],
    ) -> None:
        self.error: SpecwireError | None = None
        self._fill: Callable[[], Bits] | None = lambda: matcher.fill(output, draft_token_ids, parents)
        self._found: Bits | None = None

    def of_row(self, row: int) -> Bits | None:
        """None for no limits."""
        if self._found is None and self.error is None and self._fill is not None:
            try:
                self._found = self._fill()
            except SpecwireError as error:
                self.error = error
        return None if self._found is None else self._found[row]

    def __getstate__(self) -> dict[str, Any]:
        """As a process of a group gets them: computed."""
        self.of_row(0)
        return {"error": None, "_fill": None, "_found": self._found}
