"""Beam search: the texts of highest score, as transformers' `generate(num_beams=...)` finds them. Pure.

The score of a text is the sum of its tokens' log probabilities, in float32; that of a finished one is divided
by `length ** length_penalty`. A step extends every live beam by one token:

    live      [a, b]                 num_beams texts without an end
    extended  [b x, a end, a y, ...] all continuations, best score first
    finished  [a end]                of the first num_beams of them, those that end
    live      [b x, a y]             the first num_beams of those that do not

A step reads the likeliest `num_top` tokens after each live beam, and nothing else of the target: of the best
continuations that do not end, no live beam has more than num_beams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specwire.core import Logprobs


class Beam:
    """A text, as its last token and the text before that; the root is the empty text.

    Equal texts of one search are one object.

    Attributes:
        jump: a text that it begins with, of a length that follows from its own: any one is few jumps and
            parents away (Myers 1983). Of the root, itself.
    """

    __slots__ = ("jump", "length", "parent", "token_id")

    def __init__(self, parent: Beam | None = None, token_id: int = -1) -> None:
        self.parent = parent
        self.token_id = token_id
        self.length: int = parent.length + 1 if parent is not None else 0
        self.jump: Beam = parent if parent is not None else self
        if parent is not None:
            far = parent.jump.jump
            if parent.length - parent.jump.length == parent.jump.length - far.length:
                self.jump = far

    def tokens(self, start: int = 0) -> list[int]:
        """Its tokens from an index on."""
        found: list[int] = []
        beam = self
        while beam.length > start:
            found.append(beam.token_id)
            assert beam.parent is not None
            beam = beam.parent
        return found[::-1]


class Scored(NamedTuple):
    beam: Beam
    score: np.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamRules:
    """What a search is for.

    Attributes:
        num_beams: live beams, and finished ones that are kept; at least 2.
        max_tokens: longest text, in tokens.
        end_ids: tokens that end a text.
        length_penalty: exponent of the length that a finished text's score is divided by.
        early_stopping: when to end with `num_beams` finished texts. True: at once. False: once the best live
            beam, divided by its present length, is no better than the worst of them. "never": once none can
            become better, divided by the longest length where that is more.
    """

    num_beams: int
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    @property
    def num_top(self) -> int:
        """Likeliest tokens after a beam that a step reads."""
        return self.num_beams + len(self.end_ids)

    def normalised(self, score: np.float32, length: int) -> np.float32:
        """The score of a finished text, in float32 as transformers computes it."""
        return np.float32(score / np.float32(length**self.length_penalty))


class BeamSearch:
    """The state of a search, for one prompt.

    Attributes:
        live: best score first, all of one length.
        finished: at most num_beams, best score first; the result once the search has ended.
        ended: whether it has.
    """

    def __init__(self, rules: BeamRules) -> None:
        self._rules = rules
        self.root = Beam()
        self.live = [Scored(self.root, np.float32(0))]
        self.finished: list[Scored] = []
        self.ended = False

    def step(self, rows: Mapping[Beam, Logprobs], extend: Callable[[Beam, int], Beam] = Beam) -> None:
        """Extend every live beam by one token.

        Args:
            rows: what may follow each live beam, with the likeliest `num_top` tokens or more.
            extend: makes the beam that a token continues another one to.
        """
        rules = self._rules
        length = self.live[0].beam.length + 1
        is_last = length >= rules.max_tokens
        ending, going = [], []
        for place, found in enumerate(self._candidates(rows)):
            _, token_id, _ = found
            if not is_last and token_id not in rules.end_ids:
                going.append(found)
            elif place < rules.num_beams:
                ending.append(found)
        self._finish([Scored(extend(beam, token_id), score) for beam, token_id, score in ending], length)
        self.live = [
            Scored(extend(beam, token_id), score) for beam, token_id, score in going[: rules.num_beams]
        ]
        self.ended = is_last or not self._may_improve(length)

    def _candidates(self, rows: Mapping[Beam, Logprobs]) -> list[tuple[Beam, int, np.float32]]:
        """Continuations of the live beams, best first: beam, next token, and the score with it. Of equal ones
        those of the better beam come first."""
        found = []
        for place, (beam, score) in enumerate(self.live):
            for token_id, logprob in rows[beam].top():
                total = np.float32(np.float32(logprob) + score)
                found.append((-float(total), place, token_id, (beam, token_id, total)))
        found.sort(key=lambda each: each[:3])
        return [candidate for *_, candidate in found]

    def _finish(self, ending: Sequence[Scored], length: int) -> None:
        normalised = self._rules.normalised
        new = [Scored(beam, normalised(score, length)) for beam, score in ending]
        merged = sorted([*self.finished, *new], key=lambda each: -each.score)
        self.finished = merged[: self._rules.num_beams]

    def _may_improve(self, length: int) -> bool:
        """Whether a live beam may still displace a finished one."""
        rules = self._rules
        if len(self.finished) < rules.num_beams:
            return True
        if rules.early_stopping is True:
            return False
        is_optimistic = rules.early_stopping == "never" and rules.length_penalty > 0
        best = rules.normalised(self.live[0].score, rules.max_tokens if is_optimistic else length)
        return bool(best > self.finished[-1].score)
