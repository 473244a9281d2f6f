"""A target's tokens in the draft's own tokens, for one sequence. Pure.

The text of the target's tokens is cut into segments, each of which is encoded by itself:

    text       ├─ closed ─┤├─ closed ─┤├─ closed ─┤├─ open ─┤
    draft ids  ├──────────────────────────────────┤├─ tail ─┤

Where a segment ends follows from the text alone: at the first space after a word, once it has
`MIN_SEGMENT` bytes; tokenizers begin a token there themselves. A text without such a place is cut at
`MAX_SEGMENT` bytes, between characters, and at special tokens. So the draft's tokens are a function of the
target's tokens, in whatever steps these came, and whatever was drafted or rolled back meanwhile.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draft_service.vocabulary import SharedVocabulary
from specwire.core import num_in_common
from specwire.errors import ContextLengthError, PrefixMismatchError
from specwire.support import IntArray

MIN_SEGMENT, MAX_SEGMENT = 256, 1024
_WORD_END = re.compile(rb"[^ \t\r\n] ")
_WORD = b"x"
_NONE = np.empty(0, np.int64)


class _Segment(NamedTuple):
    """A closed segment.

    Attributes:
        end: of its bytes in the text.
        num_needed: the target's tokens up to the one that showed where it ends.
        num_ids: the draft's tokens up to its end.
    """

    end: int
    num_needed: int
    num_ids: int


class OpenEnd(NamedTuple):
    """The end of a text, as a draft is to go on from it.

    Where a text stops, its last token is often not the one that stands there once the text goes on: after
    `\\n` and `re` follow `    return`. So the draft may choose the token anew, among those that begin so.

    Attributes:
        text: that the next of the draft's tokens begins with; empty if it may be any.
        token_id: the token for just this text; None where no token ends with the text.
    """

    text: bytes
    token_id: int | None


class Translation:
    """The draft's tokens for a sequence of the target's.

    A special token that both have becomes the draft's own, any other nothing. What the draft's tokenizer puts
    before every text is put before this one, in place of a special token that begins it.

    Attributes:
        shared: both vocabularies.
        num_unchanged: the draft's tokens that the last move left as they were.
    """

    def __init__(self, shared: SharedVocabulary) -> None:
        self.shared = shared
        self._target_ids = _NONE
        self._ends: list[int] = []  # length of the text after each target token
        self._text = bytearray()
        self._segments = [_Segment(0, 0, len(shared.draft.start))]
        self._closed_ids = list(shared.draft.start)
        self._tail: list[int] = []
        self.move_to(_NONE)

    @property
    def token_ids(self) -> list[int]:
        """The draft's tokens; at least one."""
        return self._closed_ids + self._tail

    def move_to(self, target_ids: IntArray) -> None:
        """Become the translation of these tokens; what they share with the last ones is not done again."""
        num_kept = _num_in_common(self._target_ids, target_ids)
        dropped = self._truncate(num_kept)
        num_closed = len(self._closed_ids)
        self._append(target_ids[num_kept:].tolist())
        self._target_ids = target_ids
        self._tail = self._encode(self._segments[-1].end, len(self._text))
        if not (self._closed_ids or self._tail):
            self._tail = [self.shared.draft.tokenizer.eos_id or 0]  # no model begins with nothing
        self.num_unchanged = num_closed + num_in_common(dropped, self.after(num_closed))

    def after(self, num_ids: int) -> list[int]:
        """The draft's tokens after so many of them."""
        num_closed = len(self._closed_ids)
        return self._closed_ids[num_ids:] + self._tail[max(0, num_ids - num_closed) :]

    def split(self, num_target_ids: int) -> tuple[int, list[int]]:
        """How many of the draft's tokens follow from the first `num_target_ids` tokens, whatever comes after
        those, 0 from none; and all the rest."""
        num_closed = bisect_right(self._segments, num_target_ids, key=lambda segment: segment.num_needed)
        num_ids = self._segments[num_closed - 1].num_ids if num_target_ids else 0
        return num_ids, self.after(num_ids)

    def split_open(self, num_target_ids: int) -> tuple[int, list[int], OpenEnd]:
        """As `split`, with the tokens up to the open end, and that."""
        num_ids, own_ids = self.split(num_target_ids)
        tail, end = self._open_end()
        before = own_ids[: len(own_ids) - len(self._tail)] + tail
        return (num_ids, before, end) if num_ids + len(before) else (num_ids, own_ids, OpenEnd(b"", None))

    def _open_end(self) -> tuple[list[int], OpenEnd]:
        """The tokens of the open segment before its open end, and that."""
        draft, start = self.shared.draft, self._segments[-1].end
        text = bytes(self._text[start:])
        if text[-1:].isspace():  # a space often belongs to the word after it
            length = 0
            for i, token_id in enumerate(found := draft.encode(text + _WORD, goes_on=start > 0)):
                num_bytes = len(draft.text_of([token_id]))
                if length + num_bytes > len(text) > length:
                    return found[:i], OpenEnd(text[length:], None)
                length += num_bytes
        last = draft.text_of(self._tail[-1:])
        if last and text.endswith(last):
            return self._tail[:-1], OpenEnd(last, self._tail[-1])
        return self._tail, OpenEnd(b"", None)

    def _truncate(self, num_target_ids: int) -> list[int]:
        """Returns the draft's tokens that are not closed any more."""
        del self._ends[num_target_ids:]
        del self._text[self._ends[-1] if self._ends else 0 :]
        while self._segments[-1].num_needed > num_target_ids:
            self._segments.pop()
        num_ids = self._segments[-1].num_ids
        dropped = self.after(num_ids)
        del self._closed_ids[num_ids:]
        return dropped

    def _append(self, target_ids: Sequence[int]) -> None:
        texts = self.shared.target.texts
        for target_id in target_ids:
            text = texts[target_id] if target_id < len(texts) else None
            self._text += text or b""
            self._ends.append(len(self._text))
            if text is None:
                self._cut()
                is_start = len(self._ends) == 1 and bool(self.shared.draft.start)
                is_shared = target_id in self.shared and not is_start
                special_ids = self.shared.to_draft([target_id]) if is_shared else []
                self._close(len(self._text), len(self._ends), special_ids)
        self._cut()

    def _cut(self) -> None:
        """Close all segments whose end is known."""
        while True:
            start = self._segments[-1].end
            limit = start + MAX_SEGMENT
            word_end = _WORD_END.search(self._text, start + MIN_SEGMENT - 1, limit)
            if word_end:
                end = shown_at = word_end.end() - 1
            elif len(self._text) > limit:
                end, shown_at = _before_character(self._text, limit), limit
            else:
                return
            self._close(end, bisect_right(self._ends, shown_at) + 1)

    def _close(self, end: int, num_needed: int, special_ids: Sequence[int] = ()) -> None:
        self._closed_ids += self._encode(self._segments[-1].end, end)
        self._closed_ids += special_ids
        self._segments.append(_Segment(end, num_needed, len(self._closed_ids)))

    def _encode(self, start: int, end: int) -> list[int]:
        return self.shared.draft.encode(bytes(self._text[start:end]), goes_on=start > 0)


@dataclass(frozen=True, slots=True)
class Committed:
    """The target's tokens that a job of the draft commits.

    Attributes:
        translation: of the stream; used on the engine's thread alone, by one job after another.
        target_ids: int64 [n], all of them.
        num_held: those of them that the job's sequence, or the one that it is forked from, begins with.
        context_len: of the draft, in its tokens.
    """

    translation: Translation
    target_ids: IntArray
    num_held: int
    context_len: int

    @property
    def shared(self) -> SharedVocabulary:
        return self.translation.shared

    def own(self, num_draft_tokens: int, *, is_judged: bool = False) -> tuple[int, list[int]]:
        """In the draft's tokens: the length to roll back to, and what to commit after it.

        Args:
            is_judged: the length is to be a function of this stream's committed tokens alone.

        Raises:
            ContextLengthError: the draft's context does not hold them and so many more.
        """
        self.translation.move_to(self.target_ids)
        num_kept, own_ids = self.translation.split(self.num_held)
        if is_judged:
            num_kept = self.translation.num_unchanged if self.num_held else 0
            own_ids = self.translation.after(num_kept)
        self._check(num_kept + len(own_ids) + num_draft_tokens)
        return num_kept, own_ids

    def own_open(self, num_draft_tokens: int) -> tuple[int, list[int], OpenEnd]:
        """The same up to the open end, and that."""
        self.translation.move_to(self.target_ids)
        num_kept, own_ids, end = self.translation.split_open(self.num_held)
        self._check(num_kept + len(own_ids) + 1 + num_draft_tokens)
        return num_kept, own_ids, end

    def _check(self, length: int) -> None:
        if length > self.context_len:
            raise ContextLengthError("token_ids", length, f"over the draft's context of {self.context_len}")


class Transcript:
    """The target's committed tokens of a stream, as the event loop knows them."""

    def __init__(self, shared: SharedVocabulary, context_len: int) -> None:
        self._translation = Translation(shared)
        self._context_len = context_len
        self._target_ids = _NONE

    def commit(self, base_len: int, token_ids: Sequence[int], drafted: Sequence[int] = ()) -> Committed:
        """Roll back to so many tokens, drafted ones after the committed ones included; then commit others.

        Raises:
            PrefixMismatchError: there are fewer.
        """
        held = np.concatenate([self._target_ids, np.array(drafted, np.int64)])
        if base_len > len(held):
            raise PrefixMismatchError(base_len, len(held))
        num_held = min(base_len, len(self._target_ids))
        self._target_ids = np.concatenate([held[:base_len], np.array(token_ids, np.int64)])
        return Committed(self._translation, self._target_ids, num_held, self._context_len)

    def follow(self, path: Sequence[int]) -> None:
        self.commit(len(self._target_ids), path)

    def followed(self, path: Sequence[int]) -> Committed:
        """The committed tokens and others after them."""
        target_ids = np.concatenate([self._target_ids, np.array(path, np.int64)])
        return Committed(self._translation, target_ids, len(self._target_ids), self._context_len)


def _num_in_common(ours: IntArray, theirs: IntArray) -> int:
    num = min(len(ours), len(theirs))
    differs = ours[:num] != theirs[:num]
    return int(differs.argmax()) if differs.any() else num


def _before_character(text: bytearray, end: int) -> int:
    """The beginning of the character that the byte at `end` belongs to."""
    first = end
    while text[first] & 0xC0 == 0x80 and end - first < 3:
        first -= 1
    return first if text[first] & 0xC0 != 0x80 else end
