"""Saved pairs of tiny models that share a small byte-level tokenizer with a chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from tests.support import tiny_models
from tests.support.vocabularies import byte_level_backend

CONTEXT_LEN = 4096
VOCAB_SIZE = 336
DRAFT_VOCAB_SIZE = 344  # padded further, as pairs of one family are

LINES = [
    "The quick brown fox jumps over the lazy dog. Hello, hello world!\n",
    "def f(x):\n    return  x  +  1\n",
    "你好,世界。 café Zürich 👋🏽\n",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def build_tokenizer(lines: Iterable[str] = LINES, vocab_size: int = 330) -> PreTrainedTokenizerFast:
    """Byte-level BPE; a character outside ASCII is often several tokens."""
    special = ["<pad>", "<s>", "</s>"]  # 0, 1, 2: as the tiny models have them
    backend = byte_level_backend(lines, vocab_size, special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


def save_pair(directory: Path) -> tuple[Path, Path]:
    """A target and a draft that guesses well; returns their directories."""
    tokenizer = build_tokenizer()
    target = tiny_models.build(
        "llama", seed=1, vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT_LEN, num_hidden_layers=1
    )
    draft = tiny_models.build(
        "llama", seed=1, vocab_size=DRAFT_VOCAB_SIZE, max_position_embeddings=CONTEXT_LEN, num_hidden_layers=1
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        ours = dict(target.named_parameters())
        for name, weight in draft.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.02
            weight.copy_(noise)
            weight[: len(ours[name])] += ours[name]
    for name, model in (("target", target), ("draft", draft)):
        tiny_models.save(model, directory / name)
        tokenizer.save_pretrained(directory / name)
    return directory / "target", directory / "draft"
