"""A target's tokens in a draft's own: for any tokens and any rollback, the text is the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from draft_service.translation import MAX_SEGMENT, MIN_SEGMENT, Committed, Transcript, Translation
from draft_service.vocabulary import SAMPLE, SharedVocabulary, Vocabulary
from specwire.core import num_in_common
from specwire.errors import ContextLengthError, PrefixMismatchError, UnsupportedError
from specwire.support import IntArray
from specwire.text.tokenizer import Tokenizer
from tests.support import vocabularies
from tests.support.vocabularies import OTHER_TEXTS, TEXTS

CONTEXT_LEN = 1 << 20
KINDS: dict[str, tuple[Callable[[], Tokenizer], Callable[[], Tokenizer]]] = {
    "byte level": (
        vocabularies.byte_level,
        lambda: vocabularies.byte_level(OTHER_TEXTS, 300, ("<|a|>", "<|b|>")),
    ),
    "with a begin token": (
        vocabularies.byte_level,
        lambda: vocabularies.byte_level(OTHER_TEXTS, 310, bos=True),
    ),
    "pieces": (vocabularies.byte_level, vocabularies.pieces),
    "from pieces": (vocabularies.pieces, lambda: vocabularies.byte_level(OTHER_TEXTS, 300)),
}
"""A target and a draft. Each can write any bytes."""


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> SharedVocabulary:
    target, draft = KINDS[request.param]
    return SharedVocabulary(target(), draft())


def ids_of(values: list[int]) -> IntArray:
    return np.array(values, np.int64)


def moved(shared: SharedVocabulary, target_ids: list[int]) -> Translation:
    """All at once."""
    translation = Translation(shared)
    translation.move_to(ids_of(target_ids))
    return translation


def plain() -> SharedVocabulary:
    return SharedVocabulary(vocabularies.byte_level(), vocabularies.byte_level(OTHER_TEXTS, 300))


def random_tokens(shared: SharedVocabulary, rng: random.Random) -> list[int]:
    """Text as a target writes it, and any tokens at all: halves of characters, special ones, unknown ones."""
    if rng.random() < 0.5:
        text = "".join(rng.choice(TEXTS)[rng.randrange(9) :] for _ in range(rng.randrange(1, 4)))
        return shared.target.encode(text.encode(), goes_on=rng.random() < 0.5)
    return [rng.randrange(shared.target_size + 2) for _ in range(rng.randrange(1, 30))]


@pytest.mark.parametrize("seed", range(3))
def test_any_tokens_and_any_rollback(shared: SharedVocabulary, seed: int) -> None:
    """The draft's tokens are a function of the target's, in whatever steps these came, with their text."""
    rng = random.Random(seed)
    translation, target_ids = Translation(shared), list[int]()
    for _ in range(60):
        del target_ids[rng.choice([len(target_ids), rng.randrange(len(target_ids) + 1)]) :]
        target_ids += random_tokens(shared, rng)
        before = translation.token_ids
        translation.move_to(ids_of(target_ids))
        assert translation.num_unchanged == num_in_common(before, translation.token_ids)
        assert translation.token_ids == moved(shared, target_ids).token_ids
        text = shared.target.text_of(target_ids)
        written = shared.draft.text_of(translation.token_ids)
        assert written == text or (written.removeprefix(b" ") == text and text), (written, text)


def test_what_follows_does_not_change_what_is_kept(shared: SharedVocabulary) -> None:
    """The first of the two parts of `split` is the same for all continuations of the given tokens."""
    rng = random.Random(3)
    for _ in range(40):
        first = [token_id for _ in range(12) for token_id in random_tokens(shared, rng)]
        kept = set()
        for _ in range(4):
            translation = moved(shared, first + random_tokens(shared, rng))
            num_kept, rest = translation.split(len(first))
            assert translation.token_ids[num_kept:] == rest
            kept.add((num_kept, *translation.token_ids[:num_kept]))
            assert translation.split(0) == (0, translation.token_ids), "a sequence without tokens holds none"
        assert len(kept) == 1


@pytest.mark.parametrize("kind", ["byte level", "with a begin token"])
def test_plain_text_is_encoded_as_the_drafts_tokenizer_does(kind: str) -> None:
    """Segments end where tokenizers begin a token themselves."""
    target, draft = (make() for make in KINDS[kind])
    text = SAMPLE * 12
    assert len(text) > 3 * MAX_SEGMENT
    ids = target.encode(text, add_special_tokens=False)
    assert moved(SharedVocabulary(target, draft), ids).token_ids == draft.encode(text)


def test_a_segment_is_bounded_where_no_word_ends() -> None:
    shared, text = plain(), "世界" * 2000
    translation = moved(shared, shared.target.tokenizer.encode(text))
    assert shared.draft.text_of(translation.token_ids) == text.encode()
    _, rest = translation.split(1 << 30)
    assert len(shared.draft.text_of(rest)) <= MAX_SEGMENT


def test_work_for_a_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the open segment is encoded anew."""
    shared = plain()
    ids = shared.target.tokenizer.encode(SAMPLE * 40)
    translation = moved(shared, ids[:-20])
    num_bytes, encode = list[int](), shared.draft.encode

    def counted(data: bytes, *, goes_on: bool) -> list[int]:
        num_bytes.append(len(data))
        return encode(data, goes_on=goes_on)

    monkeypatch.setattr(shared.draft, "encode", counted)
    for num in range(20):
        translation.move_to(ids_of(ids[: len(ids) - 20 + num]))
    assert max(num_bytes) < MIN_SEGMENT + 64
    assert len(num_bytes) <= 22


class TestSpecialTokens:
    """Those of a text, in a draft that has them, has others, or puts some before every text."""

    def test_the_end_token_and_names(self) -> None:
        target = vocabularies.byte_level(special=("<s>", "</s>", "<mask>"))
        draft = vocabularies.byte_level(OTHER_TEXTS, 300, ("<mask>", "<|end|>"))
        shared = SharedVocabulary(target, draft)
        assert shared.to_draft([target.eos_id or 0, 2]) == [1, 0]
        ids = [0, *target.encode("ab"), 2, *target.encode("cd"), 1]
        assert moved(shared, ids).token_ids == [*draft.encode("ab"), 0, *draft.encode("cd"), 1]

    def test_a_begin_token_is_there_once(self) -> None:
        target = vocabularies.byte_level(bos=True)
        draft = vocabularies.byte_level(OTHER_TEXTS, 300, ("<s>", "</s>"), bos=True)
        shared = SharedVocabulary(target, draft)
        for add_special_tokens in (True, False):
            ids = target.encode("hello", add_special_tokens=add_special_tokens)
            assert moved(shared, ids).token_ids == draft.encode("hello")

    def test_a_draft_never_begins_with_nothing(self) -> None:
        shared = SharedVocabulary(
            vocabularies.byte_level(), vocabularies.byte_level(OTHER_TEXTS, 300, ("<a>", "<b>"))
        )
        assert moved(shared, []).token_ids == moved(shared, [0]).token_ids == [1]


class TestOpenEnd:
    """Which token the draft may choose anew, where the target's text stops."""

    def end_of(self, text: str, draft: Tokenizer) -> tuple[bytes, bytes, bool]:
        """The text before it, its own text, and whether that is a token."""
        target = vocabularies.byte_level()
        shared = SharedVocabulary(target, draft)
        num_kept, before, end = moved(shared, target.encode(text)).split_open(0)
        assert num_kept == 0
        written = shared.draft.text_of(before)
        assert written + end.text == text.encode()
        return written, end.text, end.token_id is not None

    def test_a_word_may_go_on(self) -> None:
        draft = vocabularies.byte_level(["return return return"] * 9, 300)
        assert self.end_of("x return", draft) == (b"x", b" return", True)

    def test_a_space_belongs_to_the_next_word(self) -> None:
        draft = vocabularies.byte_level(["return\n        x\n" * 9], 300)
        before, end, is_token = self.end_of("return\n        ", draft)
        assert (end, is_token) == (b" ", False)
        assert before.endswith(b"\n       ")

    def test_nothing_before_it(self) -> None:
        """A model needs a token before the one that it chooses."""
        draft = vocabularies.byte_level(["a b"], 300)
        shared = SharedVocabulary(vocabularies.byte_level(), draft)
        translation = moved(shared, shared.target.encode(b"a", goes_on=False))
        assert translation.split_open(0) == (0, translation.token_ids, (b"", None))


class TestTranscript:
    """What jobs are told, as the stream goes on."""

    def test_rollback_into_drafted_tokens(self) -> None:
        transcript = Transcript(plain(), CONTEXT_LEN)
        transcript.commit(0, [5, 6, 7])
        committed = transcript.commit(4, [9], drafted=[8, 8, 8])
        assert committed.target_ids.tolist() == [5, 6, 7, 8, 9]
        assert committed.num_held == 3
        assert transcript.followed([1, 2]).target_ids.tolist() == [5, 6, 7, 8, 9, 1, 2]
        transcript.follow([4])
        assert transcript.commit(2, []).target_ids.tolist() == [5, 6]
        with pytest.raises(PrefixMismatchError):
            transcript.commit(4, [], drafted=[8])

    def test_the_drafts_own_context(self) -> None:
        shared = plain()
        ids = shared.target.encode(b"\xe4\xbd" * 20, goes_on=False)
        committed = Committed(Translation(shared), ids_of(ids), 0, 44)
        assert len(committed.own(4)[1]) == 40
        with pytest.raises(ContextLengthError, match="45"):
            committed.own(5)


class TestVocabularies:
    """Tokens as text, and what is shared."""

    def test_shared_tokens_have_the_same_text(self, shared: SharedVocabulary) -> None:
        ends = {shared.target.tokenizer.eos_id, *shared.target.tokenizer.special_ids}
        ours = [i for i in range(shared.target_size) if i in shared and i not in ends]
        pairs = [*zip(ours, shared.to_draft(ours), strict=True)]
        assert all(shared.target.texts[ours] == shared.draft.texts[theirs] for ours, theirs in pairs)
        assert len({theirs for _, theirs in pairs}) == len(pairs) > 50
        texts = {text for text in shared.target.texts if text} & {text for text in shared.draft.texts if text}
        assert len(pairs) == len(texts)

    def test_a_token_that_is_not_shared_stands_for_the_first_of_its_text(self) -> None:
        target = vocabularies.byte_level(["ab ab"], 270)
        draft = vocabularies.byte_level(["abc abc abc"] * 9, 300)
        shared = SharedVocabulary(target, draft)
        first = dict(zip(shared.own_ids.tolist(), shared.first_ids.tolist(), strict=True))
        assert first[draft.table["abc"]] == target.table["ab"]
        assert first[draft.table["c"]] == target.table["c"]

    def test_tokens_that_begin_with_a_text(self) -> None:
        vocabulary = Vocabulary(vocabularies.byte_level())
        for text in (b"h", b"he", b" ", b"\xff", b"no such token"):
            expected = {i for i, other in enumerate(vocabulary.texts) if other and other.startswith(text)}
            assert set(vocabulary.beginning_with(text).tolist()) == expected

    @pytest.mark.parametrize("name", ["WordPiece", "none"])
    def test_a_tokenizer_of_another_kind(self, name: str) -> None:
        backend = Backend(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
        if name == "WordPiece":
            backend.decoder = decoders.WordPiece()
        with pytest.raises(UnsupportedError, match=name):
            Vocabulary(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)))
