"""Tokenizers of several kinds, made here. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from specwire.text.tokenizer import Tokenizer

TEXTS = [
    "def f(x):\n    return  x  +  1\n\n\nclass A:\n        pass  # a comment, 1713\n",
    "The quick brown fox jumps over the lazy dog. Hello, hello world! He said 'no'.\n",
    "你好,世界。 café Zürich 👋🏽 naïve\n",
]
OTHER_TEXTS = ["for word in words:\n    print(word, 17, other_word)\n", "Hello brown world, 你们好 👋\n"]


def byte_level_backend(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> Backend:
    """Byte-level BPE; a character outside ASCII is often several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text for text in texts for _ in range(3)], trainer)
    return backend


def byte_level(
    texts: Iterable[str] = TEXTS,
    vocab_size: int = 330,
    special: Sequence[str] = ("<s>", "</s>"),
    *,
    bos: bool = False,
) -> Tokenizer:
    """As GPT-2's; the second special token ends a text, and the first begins each one if `bos`."""
    return _wrapped(byte_level_backend(texts, vocab_size, special), special, bos=bos)


def pieces(texts: Iterable[str] = TEXTS, vocab_size: int = 420) -> Tokenizer:
    """As Llama 2's: `▁` for a space, one before every text, and a token for each byte that has no other."""
    words = [text.replace(" ", "▁") for text in texts]
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 259, show_progress=False, limit_alphabet=60)
    trained.train_from_iterator([word for word in words for _ in range(3)], trainer)
    found = trained.get_vocab()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names = special + sorted(found, key=found.__getitem__)
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    table = {name: i for i, name in enumerate(names)}
    model = models.BPE(table, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in special[:3]])
    return _wrapped(backend, ("<s>", "</s>"), bos=True)


def letters(tokens: Sequence[str]) -> Tokenizer:
    """One token for each of these letters, and no others."""
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    tokenizer._backend.save_pretrained(directory)


def _wrapped(backend: Backend, special: Sequence[str], *, bos: bool) -> Tokenizer:
    begin, end = special[0], special[1]
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
        )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end))
