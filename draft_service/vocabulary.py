"""Tokens as text: which of them two tokenizers share, and any bytes as tokens of one. Imports no torch.

Source: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (arXiv 2502.05202): token-level intersection, and matching of strings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from specwire.support import IntArray
from specwire.text.token_texts import BYTE_NAME, token_texts
from specwire.text.tokenizer import Tokenizer

SAMPLE = """\
Reading is to the mind what exercise is to the body, and it was said, in 1713, of a man who read little else.
def count_words(lines: list[str], least: int = 2) -> dict[str, int]:
    \"\"\"How often each word occurs, for those that occur at least so many times.\"\"\"
    counts = {}
    for line in lines:
        for word in line.split():
            counts[word] = counts.get(word, 0) + 1
    return {word: count for word, count in counts.items() if count >= least}
"""
"""Prose and code, to say how much of a text is shared."""
_ANCHOR = "."
"""Text before a text that goes on: tokenizers that put a space before every text put it before this."""


class Vocabulary:
    """A tokenizer as bytes.

    Attributes:
        tokenizer: itself.
        texts: by token id; None where a token stands for no text: special ones, and ids without a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises:
        UnsupportedError: what its tokens stand for is not known.
        """
        self.tokenizer = tokenizer
        self.texts = token_texts(tokenizer)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Token by text. Of several with the same text, that which the tokenizer itself chooses."""
        found: dict[bytes, int] = {}
        for token_id, text in enumerate(self.texts):
            if text and (text not in found or found[text] in self._byte_ids):
                found[text] = token_id
        return found

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """Tokens `<0x41>`: used only for bytes that have no other token."""
        return frozenset(i for name, i in self.tokenizer.table.items() if BYTE_NAME.fullmatch(name))

    @cached_property
    def _sorted(self) -> tuple[list[bytes], IntArray]:
        found = sorted((text, token_id) for token_id, text in enumerate(self.texts) if text)
        return [text for text, _ in found], np.array([token_id for _, token_id in found], np.int64)

    def beginning_with(self, text: bytes) -> IntArray:
        """int64 [n], the tokens whose text begins so."""
        texts, ids = self._sorted
        first = bisect_left(texts, text)
        return ids[first : bisect_left(texts, True, first, key=lambda other: not other.startswith(text))]

    @cached_property
    def start(self) -> list[int]:
        """What the tokenizer puts before every text, often a begin token."""
        return self.tokenizer.encode("")

    def text_of(self, token_ids: Iterable[int]) -> bytes:
        """Their bytes; special tokens have none."""
        texts, num = self.texts, len(self.texts)
        return b"".join((texts[token_id] or b"") if token_id < num else b"" for token_id in token_ids)

    def encode(self, data: bytes, *, goes_on: bool) -> list[int]:
        """Tokens of a text; those of bytes that are no UTF-8 as `_spell`.

        Args:
            goes_on: other text is before it, so that nothing is to be put before this one.
        """
        found: list[int] = []
        for run, is_text in _runs(data):
            if is_text:
                found += self._encode(run.decode(), goes_on=goes_on or bool(found))
            else:
                found += self._spell(run)
        return found

    def _encode(self, text: str, *, goes_on: bool) -> list[int]:
        if goes_on and self._puts_before:
            anchor = self.tokenizer.encode(_ANCHOR, add_special_tokens=False)
            found = self.tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
            if found[: len(anchor)] == anchor:
                return found[len(anchor) :]
        return self.tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _puts_before(self) -> bool:
        """Whether the tokenizer changes the beginning of a text."""
        return self.text_of(self.tokenizer.encode("x", add_special_tokens=False)) != b"x"

    def _spell(self, data: bytes) -> list[int]:
        """Part of a character: one token if there is one for it, else one for each byte that has one."""
        whole = self.ids.get(data)
        if whole is not None:
            return [whole]
        each = (self.ids.get(data[i : i + 1]) for i in range(len(data)))
        return [token_id for token_id in each if token_id is not None]


def _runs(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Maximal parts of the data, and whether each is UTF-8."""
    start = 0
    while start < len(data):
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            first, end = start + error.start, start + error.end
            if first > start:
                yield data[start:first], True
            while end < len(data) and data[end] & 0xC0 == 0x80:  # belong to no character either
                end += 1
            yield data[first:end], False
            start = end
        else:
            yield data[start:], True
            return


class SharedVocabulary:
    """The tokens that a target and a draft share: those with the same text, special ones with the same name,
    and the end tokens. One token of either belongs to one of the other.

    Attributes:
        target, draft: both vocabularies.
        own_ids, first_ids: int64 [num_own], the draft's tokens whose text begins with a shared token in the
            target's tokens, and that token. Shared ones begin with themselves.
        free_ids: int64, the draft's tokens that mean something to the target: text, or a shared special one.
        share: of the target's tokens, in [0, 1].
        share_of_text: of the target's tokens of `SAMPLE`.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        """Raises:
        UnsupportedError: what the tokens of one stand for is not known.
        """
        self.target, self.draft = Vocabulary(target), Vocabulary(draft)
        self._to_draft = self._pairs()
        first_ids = {draft_id: target_id for target_id, draft_id in self._to_draft.items()}
        for draft_id, text in enumerate(self.draft.texts):
            if text and draft_id not in first_ids:
                found = self.target.encode(text, goes_on=True)
                if found and found[0] in self:
                    first_ids[draft_id] = found[0]
        self.own_ids = np.array([*first_ids], np.int64)
        self.first_ids = np.array([*first_ids.values()], np.int64)
        has_text = {draft_id for draft_id, text in enumerate(self.draft.texts) if text}
        self.free_ids = np.array(sorted(has_text | {*self._to_draft.values()}), np.int64)
        sample = self.target.encode(SAMPLE.encode(), goes_on=False)
        self.share = len(self._to_draft) / max(1, len(target.table))
        self.share_of_text = sum(token_id in self for token_id in sample) / max(1, len(sample))

    def _pairs(self) -> dict[int, int]:
        """The draft's token for each shared one of the target."""
        ours, theirs = self.target.ids, self.draft.ids
        pairs = {ours[text]: theirs[text] for text in ours.keys() & theirs}
        target, draft = self.target.tokenizer, self.draft.tokenizer
        names, draft_names = (
            {each.spell(token_id): token_id for token_id in each.special_ids} for each in (target, draft)
        )
        pairs |= {names[name]: draft_names[name] for name in names.keys() & draft_names}
        end, draft_end = target.eos_id, draft.eos_id
        if end is not None and draft_end is not None and draft_end not in pairs.values():
            pairs.setdefault(end, draft_end)
        return pairs

    @property
    def target_size(self) -> int:
        """Width of a row of scores of target tokens."""
        return len(self.target.texts)

    def __contains__(self, target_id: int) -> bool:
        """Whether the draft shares a token of the target."""
        return target_id in self._to_draft

    def to_draft(self, target_ids: Sequence[int]) -> list[int]:
        """The draft's tokens for shared ones of the target; 0 for others."""
        return [self._to_draft.get(target_id, 0) for target_id in target_ids]
