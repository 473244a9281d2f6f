"""Text from tokens: whole characters, stop strings, and tokens released in order."""

from __future__ import annotations

import random
import timeit
from collections.abc import Iterable, Iterator, Sequence

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from coordinator.text import IncrementalDetokenizer, StopMatcher, TextAssembler
from specwire.text.tokenizer import Tokenizer
from tests.support import vocabularies

LINES = [
    "The quick brown fox jumps over the lazy dog. Hello, hello world!\n",
    "你好,世界。今天天气很好,我们去公园散步吧。\n",
    "👋🏽 family: 👨‍👩‍👧‍👦, flags: 🇪🇺🇯🇵, café = cafe\u0301, n\u0303, Zürich\n",
    "def f(x):\n    return  x  +  1\n",
]
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Byte-level BPE: a character outside ASCII is often several tokens, and tokens may hold parts of two."""
    return vocabularies.byte_level(LINES)


def build_metaspace(decoder: str) -> Tokenizer:
    """As sentencepiece has it: words begin with ▁, the first space is dropped, rare characters are bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = ["▁", "▁the", "▁dog", "▁a", "b", "c", "你", "!", "\n", "▁▁"]
    vocab |= {word: 259 + index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    if decoder == "llama":
        steps = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    else:
        steps = [decoders.ByteFallback(), decoders.Metaspace()]
    backend.decoder = decoders.Sequence(steps)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


@pytest.fixture(scope="module", params=["llama", "metaspace"])
def metaspace(request: pytest.FixtureRequest) -> Tokenizer:
    return build_metaspace(request.param)


@pytest.fixture(scope="module", params=["byte level", "llama", "metaspace"])
def any_tokenizer(request: pytest.FixtureRequest, byte_level: Tokenizer) -> Tokenizer:
    return byte_level if request.param == "byte level" else build_metaspace(request.param)


def pieces_of(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.add(token_id) for token_id in output), detokenizer.flush()]


def split(text: str, rng: random.Random) -> Iterator[str]:
    while text:
        size = rng.randint(1, 5)
        yield text[:size]
        text = text[size:]


class TestIncrementalDetokenizer:
    @pytest.mark.parametrize("kind", ["any tokens", "bytes over 127"])
    def test_whatever_comes_joins_to_what_decode_gives(self, byte_level: Tokenizer, kind: str) -> None:
        rng, ids = random.Random(1), range(byte_level.vocab_size + 5)
        high = [i for i in range(2, 258) if byte_level.decode([i]) == REPLACEMENT]
        assert len(high) == 128
        for _ in range(300):
            output = rng.choices(ids if kind == "any tokens" else high, k=rng.randint(0, 150))
            assert "".join(pieces_of(byte_level, [], output)) == byte_level.decode(output)

    def test_a_split_character_is_never_shown_in_parts(self, byte_level: Tokenizer) -> None:
        rng = random.Random(3)
        for _ in range(100):
            text = "".join(rng.choices("".join(LINES), k=40))
            # Bytes one by one: the hardest way to split.
            ids = [i for c in text for i in self.bytes_of(byte_level, c)]
            pieces = pieces_of(byte_level, [], ids)
            assert "".join(pieces) == text
            assert not any(REPLACEMENT in piece for piece in pieces)

    @staticmethod
    def bytes_of(tokenizer: Tokenizer, char: str) -> list[int]:
        alphabet = tokenizer._backend.backend_tokenizer.pre_tokenizer.pre_tokenize_str(char)[0][0]
        return [tokenizer._backend.convert_tokens_to_ids(letter) for letter in alphabet]

    def test_output_continues_the_prompt(self, byte_level: Tokenizer) -> None:
        ids = byte_level.encode("".join(LINES))
        for cut in range(0, len(ids), 7):
            shown = byte_level.decode(ids[:cut]).rstrip(REPLACEMENT)
            pieces = pieces_of(byte_level, ids[:cut], ids[cut:])
            assert shown + "".join(pieces) == "".join(LINES)
            assert pieces[-1] == "", "nothing waits for the end"

    def test_the_first_space_survives_after_a_prompt(self, metaspace: Tokenizer) -> None:
        the, dog = metaspace._backend.convert_tokens_to_ids(["▁the", "▁dog"])
        assert pieces_of(metaspace, [1, the], [dog, the, 2]) == [" dog", " the", "", ""]
        assert pieces_of(metaspace, [1], [dog, the]) == ["dog", " the", ""]
        assert "".join(pieces_of(metaspace, [], [the, *[1] * 40, dog])) == "the dog"
        beyond = metaspace.vocab_size  # a model's padding: no token, no text
        assert "".join(pieces_of(metaspace, [], [the, beyond] * 40)) == " ".join(["the"] * 40)

    def test_metaspace_text_joins_to_what_decode_gives(self, metaspace: Tokenizer) -> None:
        rng = random.Random(4)
        units = [[i] for i in range(259, 269)]
        units += [[3 + byte for byte in char.encode()] for char in "é好👋好好"]
        for _ in range(300):
            prompt = [i for unit in rng.choices(units, k=rng.randint(0, 30)) for i in unit]
            output = [i for unit in rng.choices(units, k=60) for i in unit]
            whole = metaspace.decode(prompt + output)
            assert metaspace.decode(prompt) + "".join(pieces_of(metaspace, prompt, output)) == whole

    def test_long_runs_of_byte_tokens(self, metaspace: Tokenizer) -> None:
        ids = [3 + byte for byte in ("好é👋" * 30).encode()]
        assert "".join(pieces_of(metaspace, [], ids)) == "好é👋" * 30
        for num_characters in (3, 14, 15, 31):
            cut = len(("好é👋" * 30)[:num_characters].encode())
            rest = "".join(pieces_of(metaspace, ids[:cut], ids[cut:]))
            assert rest == ("好é👋" * 30)[num_characters:]

    def test_invalid_bytes_do_not_stall(self, any_tokenizer: Tokenizer) -> None:
        stray = next(i for i in range(3, 259) if any_tokenizer.decode([i, i]) == 2 * REPLACEMENT)
        detokenizer = IncrementalDetokenizer(any_tokenizer, [])
        shown = 0
        for num_tokens in range(1, 100):
            shown += len(detokenizer.add(stray))
            assert num_tokens - shown <= 8
            assert detokenizer.num_pending <= 8
        assert shown + len(detokenizer.flush()) == 99

    def test_cost_does_not_grow_with_the_text(self, byte_level: Tokenizer) -> None:
        longest = 0

        class Counting(Tokenizer):
            def decode(self, token_ids: Sequence[int], **options: bool) -> str:
                nonlocal longest
                longest = max(longest, len(token_ids))
                return super().decode(token_ids, **options)

        ids = [random.Random(5).randrange(byte_level.vocab_size) for _ in range(3000)] + [0, 1] * 500
        pieces_of(Counting(byte_level._backend), ids, ids)
        assert longest <= 48


def first_stop(text: str, stops: Iterable[str], first_end: int = 1) -> tuple[str, str | None]:
    """By definition: the text before the stop string that ends first, not before `first_end`; of several the
    longest."""
    for end in range(first_end, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


class TestStopMatcher:
    @pytest.mark.parametrize("begins_unstoppable", [False, True])
    @pytest.mark.parametrize("letters", ["ab", "abc"])
    def test_any_text_in_any_pieces(self, letters: str, *, begins_unstoppable: bool) -> None:
        rng = random.Random(6)
        for _ in range(1500):
            stops = ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4))]
            text = "".join(rng.choices("abc", k=rng.randint(0, 20)))
            cut = rng.randint(0, len(text)) if begins_unstoppable else 0
            matcher = StopMatcher(stops)
            got = "".join(matcher.add(piece, may_stop=False) for piece in split(text[:cut], rng))
            got += "".join(matcher.add(piece) for piece in split(text[cut:], rng)) + matcher.flush()
            assert (got, matcher.stopped_by) == first_stop(text, stops, cut + 1)

    @pytest.mark.parametrize(
        ("stops", "pieces", "released"),
        [
            (["aab"], ["a", "a", "a", "b", "x"], ["", "", "a", "", ""]),
            (["<end>"], ["one <", "en", "d>two"], ["one ", "", ""]),
            (["<end>"], ["one <", "en", "two"], ["one ", "", "<entwo"]),
            (["ab", "abc"], ["xabc"], ["x"]),
            (["abcd", "bc"], ["xab", "cd"], ["x", "a"]),
            (["stop"], ["stop"], [""]),
        ],
    )
    def test_what_is_held_back(self, stops: list[str], pieces: list[str], released: list[str]) -> None:
        matcher = StopMatcher(stops)
        assert [matcher.add(piece) for piece in pieces] == released

    def test_a_long_stop_string_is_cheap(self) -> None:
        matcher = StopMatcher(["a" * 20_000 + "b"])
        assert matcher.add("a" * 60_000) == "a" * 40_000
        assert matcher.add("b") == ""
        assert matcher.stopped_by is not None

    def test_many_stop_strings_that_begin_alike_are_cheap(self) -> None:
        """One that is open keeps a long text, in which others begin everywhere."""
        others = ["a" * num + "c" * (1024 - num) for num in range(1, 16)]
        matcher = StopMatcher(["a" * 1023 + "b", *others])
        took_s = timeit.timeit(lambda: matcher.add("a"), number=2048)
        assert took_s < 1  # 5 where the whole text is read at each token


class TestTextAssembler:
    def run(
        self, tokenizer: Tokenizer, ids: list[int], stops: Iterable[str] = ()
    ) -> tuple[list[list[tuple[int, str]]], TextAssembler[int]]:
        assembler = TextAssembler[int](tokenizer, [], stops)
        steps = [assembler.add(i, i) for i in ids]
        return [*steps, assembler.finish()], assembler

    def test_every_token_once_in_order_with_all_text(self, byte_level: Tokenizer) -> None:
        rng = random.Random(7)
        for _ in range(200):
            ids = [rng.randrange(byte_level.vocab_size) for _ in range(rng.randint(0, 60))]
            steps, assembler = self.run(byte_level, ids, ["e q", "ohé", " "])
            released = [t for step in steps for t in step]
            assert [item for item, _ in released] == ids[: len(released)]
            assert assembler.stopped_by is not None or len(released) == len(ids)
            text, stop = first_stop(byte_level.decode(ids), ["e q", "ohé", " "])
            assert ("".join(text for _, text in released), assembler.stopped_by) == (text, stop)

    def test_tokens_of_an_incomplete_character_wait(self, byte_level: Tokenizer) -> None:
        ids = TestIncrementalDetokenizer.bytes_of(byte_level, "👋")
        steps, _ = self.run(byte_level, [*ids, *ids[:2]])
        assert [[text for _, text in step] for step in steps] == [
            [], [], [], ["", "", "", "👋"], [], [], ["", REPLACEMENT],
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("letters", "stops", "released"),
        [
            ("x<y<E>z", ["<E>", "never"], [["x"], [], ["<", "y"], [], [], ["", "", ""], [], []]),
            ("aaa", ["a"], [[""], [], [], []]),
            ("ab<E", ["<E>"], [["a"], ["b"], [], [], ["<", "E"]]),
        ],
        ids=["a stop string", "the first token", "the text ends"],
    )
    def test_tokens_that_may_be_a_stop_string_wait(
        self, letters: str, stops: list[str], released: list[list[str]], byte_level: Tokenizer
    ) -> None:
        """One token for each letter."""
        ids = [byte_level.encode(letter)[0] for letter in letters]
        steps, assembler = self.run(byte_level, ids, stops)
        assert [[text for _, text in step] for step in steps] == released
        assert assembler.stopped_by == first_stop(letters, stops)[1]

    @pytest.mark.parametrize("is_unstoppable", [False, True])
    def test_an_incomplete_character_may_be_a_stop_string(
        self, byte_level: Tokenizer, is_unstoppable: bool
    ) -> None:
        first, _ = TestIncrementalDetokenizer.bytes_of(byte_level, "é")
        assembler = TextAssembler[int](byte_level, [], [REPLACEMENT], min_tokens=int(is_unstoppable))
        assert assembler.add(first, first) == []
        assert [text for _, text in assembler.finish()] == [REPLACEMENT if is_unstoppable else ""]
        assert assembler.stopped_by == (None if is_unstoppable else REPLACEMENT)

    def test_a_silent_token_counts_and_adds_no_text(self, byte_level: Tokenizer) -> None:
        assembler = TextAssembler[int](byte_level, [], ["<x"])
        [a], [less] = byte_level.encode("a"), byte_level.encode("<")
        half, _ = TestIncrementalDetokenizer.bytes_of(byte_level, "é")
        assert [text for _, text in assembler.add(a, a)] == ["a"]
        assert assembler.add(less, less) == []
        assert [text for _, text in assembler.add(half, half)] == []
        assert [text for _, text in assembler.add(a, a, silent=True)] == ["<", REPLACEMENT, ""]
        assert assembler.finish() == []

    def test_a_silent_token_releases_nothing_uncertain(self, byte_level: Tokenizer) -> None:
        assembler = TextAssembler[int](byte_level, [], ["<x"])
        assert assembler.add(byte_level.encode("<")[0], 0) == []
        assert assembler.add(1, 1, silent=True) == []
        assert [text for _, text in assembler.finish()] == ["<", ""]

    def test_a_prompt_that_ends_with_a_replacement_character(self, byte_level: Tokenizer) -> None:
        """It is whole, and no part of the output."""
        ids = byte_level.encode(f"x{REPLACEMENT}")
        assert pieces_of(byte_level, ids, byte_level.encode("ab")) == [*"ab", ""]

    def test_a_prompt_that_ends_within_a_character(self, byte_level: Tokenizer) -> None:
        first, second = TestIncrementalDetokenizer.bytes_of(byte_level, "é")
        assembler = TextAssembler[int](byte_level, [first])
        assert [text for _, text in assembler.add(second, second)] == ["é"]
        assembler = TextAssembler[int](byte_level, [first])
        assert [text for _, text in assembler.add(1, 1, silent=True)] == [""]
        assert assembler.finish() == []
