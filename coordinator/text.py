"""From tokens to text that is certain: whole characters, and no part of a stop string.

Three state machines without I/O:

    token id ──IncrementalDetokenizer──▶ whole characters ──StopMatcher──▶ text before any stop string
             └────────────────────────── TextAssembler ──────────────────────────▶ released tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from specwire.text.tokenizer import Tokenizer

NUM_AT_ONCE = 256
"""Tokens of a whole text that are decoded in a few milliseconds; then others have their turn."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# An incomplete character has at most this many bytes, and decoders write at most one U+FFFD for each byte.
_MAX_INCOMPLETE = 3
# Tokens that may wait for their character. A character spans at most 4; if more wait, bytes are invalid.
_MAX_PENDING = 8
# The window is cut to a few tokens at this length. A cut among invalid bytes must keep more bytes than three
# incomplete characters have, so that decoding is synchronised again at the end of the window.
_MAX_WINDOW = 32
_CONTEXT = 16


class IncrementalDetokenizer:
    """Turns token ids into text one by one, at a cost that does not grow with the text.

    Decoding a token alone is wrong (the bytes of a character may span tokens, and many decoders drop the
    space before a first word), and decoding everything each time is quadratic. So a short window is decoded:
    some tokens of context, at first from the end of the prompt, then the latest ones.

        window    [ context . . | pending . ]
        decoded    "never emitted|again" "\\ufffd"     ← an incomplete character waits for its last token

    All pieces and `flush()` joined equal the decoded output. Invalid bytes become U+FFFD at most 8 tokens
    later; only there, and only with decoders that discard a valid character because of an invalid byte after
    it (byte fallback), may the number of U+FFFD differ.

    `tokenizers.decoders.DecodeStream` does not do: it holds invalid bytes back until a valid character
    follows, however late, and has no flush for what is incomplete at the end.

    Without a tokenizer the text is always empty.

    Attributes:
        num_pending: latest tokens that wait for the rest of a character; at most 8.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self.num_pending = 0
        self._window = self._context(prompt_ids)
        self._boundary = len(self._window)  # window[:boundary] was whole characters when it was added
        # A prompt may end within a character (a resumed generation): then the output completes it.
        text = self._decode(self._window)
        self._num_emitted = len(text) if self._ends_with_replacement(text) else len(text.rstrip(_REPLACEMENT))

    def _ends_with_replacement(self, text: str) -> bool:
        """Whether the prompt itself ends with U+FFFD, rather than with a part of a character."""
        if self._tokenizer is None or not text.endswith(_REPLACEMENT):
            return False
        ids = self._tokenizer.encode(_REPLACEMENT, add_special_tokens=False)
        return bool(ids) and self._window[-len(ids) :] == ids

    def add(self, token_id: int) -> str:
        """Append a token; returns the text that it completes, often none or one word."""
        if not self._has_text(token_id):
            if self.num_pending:
                self._wait()
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_certain = len(text.rstrip(_REPLACEMENT))
        cut = 0
        if num_certain == len(text):
            self.num_pending = 0
            self._boundary, cut = len(self._window), self._boundary
        elif self._wait() == _MAX_PENDING:
            num_certain = max(num_certain, len(text) - _MAX_INCOMPLETE)
            cut = len(self._window) - _CONTEXT
        piece = text[self._num_emitted : num_certain]
        self._num_emitted = max(self._num_emitted, num_certain)
        if len(self._window) >= _MAX_WINDOW:
            self._cut(cut, num_waiting=len(text) - self._num_emitted)
        return piece

    def flush(self) -> str:
        """At the end of the output: the text of an incomplete character, as it decodes."""
        text = self._decode(self._window)
        piece = text[self._num_emitted :]
        self._num_emitted = len(text)
        self.num_pending = 0
        return piece

    def _wait(self) -> int:
        self.num_pending = min(self.num_pending + 1, _MAX_PENDING)
        return self.num_pending

    def _has_text(self, token_id: int) -> bool:
        if self._tokenizer is None:
            return False
        return not self._skips_special or token_id not in self._tokenizer.special_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, from where a character begins (if one does)."""
        tail = [i for i in prompt_ids[-_CONTEXT:] if self._has_text(i)]
        for start in range(_MAX_INCOMPLETE + 1):
            text = self._decode(tail[start:])
            if text and not text.startswith(_REPLACEMENT):
                return tail[start:]
        return tail

    def _cut(self, start: int, num_waiting: int) -> None:
        """Drop the window's tokens before `start`; its last `num_waiting` characters are not yet emitted."""
        window = self._window[start:]
        text = self._decode(window)
        if len(text) > num_waiting:  # without text before it a word may lose its space: cut a later time
            self._window = window
            self._boundary = max(0, self._boundary - start)
            self._num_emitted = len(text) - num_waiting


class _StopString:
    """How much of one stop string the text ends with, at a constant cost for each character.

    Attributes:
        num_open: latest characters of the text that are the beginning of the stop string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_open = 0
        # Where a longer beginning of it does not go on, the next shorter one that the text ends with.
        self._shorter = [0]

    def find(self, text: str, *, may_stop: bool) -> int | None:
        """Append text; returns where in it the stop string ends for the first time, if that counts."""
        stop, num_open, i = self.stop, self.num_open, 0
        while i < len(text):
            if not num_open:  # quick, as it is almost always
                i = text.find(stop[0], i)
                if i < 0:
                    break
            num_open = self._after(num_open, text[i])
            i += 1
            if num_open == len(stop):
                if may_stop:
                    return i
                num_open = self._next_shorter(num_open)
        self.num_open = num_open
        return None

    def _after(self, num_open: int, char: str) -> int:
        while num_open and self.stop[num_open] != char:
            num_open = self._next_shorter(num_open)
        return num_open + (self.stop[num_open] == char)

    def _next_shorter(self, num_open: int) -> int:
        while len(self._shorter) < num_open:  # known as far as it was asked for (Knuth, Morris, Pratt)
            known = len(self._shorter)
            self._shorter.append(self._after(self._shorter[known - 1], self.stop[known]))
        return self._shorter[num_open - 1]


class StopMatcher:
    """Finds the stop string that ends first, and holds back text that may be the beginning of one.

    The result depends on the text alone, not on how it was split into pieces. Of stop strings that end at the
    same character the longest counts.

    Attributes:
        stopped_by: the stop string that was found, or None.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._stop_strings = [_StopString(stop) for stop in stop_strings]
        self._held = ""
        self.stopped_by: str | None = None

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Append text; returns what certainly precedes any stop string. After a match that is nothing.

        Unless it `may_stop`, a stop string that ends in this text does not count.
        """
        if self.stopped_by is not None:
            return ""
        num_held, ends = len(self._held), []
        for each in self._stop_strings:
            end = each.find(text, may_stop=may_stop)
            if end is not None:
                ends.append((end, -len(each.stop), each.stop))
        text = self._held + text
        if ends:
            end, _, self.stopped_by = min(ends)
            self._held = ""
            return text[: num_held + end - len(self.stopped_by)]
        split = len(text) - max((each.num_open for each in self._stop_strings), default=0)
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """At the end of the output: the text held back, which did not become a stop string."""
        text, self._held = self._held, ""
        return text


Item = TypeVar("Item")


class TextAssembler(Generic[Item]):
    """Releases tokens, in order, as soon as all of their text is certain.

    The texts of all released tokens joined are the output. A token waits while its character is incomplete
    or its text may be part of a stop string; a character counts as text of the token that completes it.
    Tokens come with an item of the caller's each, and are released as pairs of item and text.

    Attributes:
        stopped_by: the stop string that ended the output, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        stop_strings: Iterable[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """A stop string that ends in the text of the first `min_tokens` tokens does not count."""
        self._has_text = tokenizer is not None
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._num_unstoppable = min_tokens
        self._matcher = StopMatcher(stop_strings)
        self._held: deque[tuple[Item, str]] = deque()
        self._num_certain = 0  # characters of the held tokens that precede any stop string

    @property
    def stopped_by(self) -> str | None:
        return self._matcher.stopped_by

    def waiting(self, num_latest: int) -> list[Item]:
        """Those of the latest tokens that are not released yet."""
        return [item for item, _ in islice(reversed(self._held), num_latest)][::-1] if self._held else []

    def add(self, token_id: int, item: Item, silent: bool = False) -> list[tuple[Item, str]]:
        """Append a token and return those that are now certain.

        On a stop string these are all up to this token, with their texts cut before the match; later calls
        return nothing.

        Args:
            silent: the token ends the generation: it counts, but adds no text.
        """
        if not self._has_text:
            return [(item, "")]
        if self.stopped_by is not None:
            return []
        if silent:
            self._complete_character()
            if self.stopped_by is not None:
                return self._release_all()
        piece = "" if silent else self._detokenizer.add(token_id)
        self._held.append((item, piece))
        may_stop = self._num_unstoppable <= 0
        self._num_unstoppable -= 1
        self._num_certain += len(self._matcher.add(piece, may_stop=may_stop))
        return self._release() if self.stopped_by is None else self._release_all()

    def finish(self) -> list[tuple[Item, str]]:
        """At the end of the generation: the tokens that still wait; none after a stop string."""
        if self.stopped_by is None:
            self._complete_character()
        self._num_certain += len(self._matcher.flush())
        return self._release_all()

    def _complete_character(self) -> None:
        """No byte will follow: an incomplete character becomes text of the latest token, as it decodes."""
        piece = self._detokenizer.flush()
        if piece and self._held:  # none is held if the prompt ended within a character
            item, text = self._held[-1]
            self._held[-1] = item, text + piece
            may_stop = self._num_unstoppable < 0  # that of the latest token
            self._num_certain += len(self._matcher.add(piece, may_stop=may_stop))

    def _release(self) -> list[tuple[Item, str]]:
        released = []
        num_ready = len(self._held) - self._detokenizer.num_pending
        while num_ready > 0 and len(self._held[0][1]) <= self._num_certain:
            released.append(self._held.popleft())
            self._num_certain -= len(released[-1][1])
            num_ready -= 1
        return released

    def _release_all(self) -> list[tuple[Item, str]]:
        released = []
        while self._held:
            item, text = self._held.popleft()
            released.append((item, text[: self._num_certain]))
            self._num_certain -= len(released[-1][1])
        return released
