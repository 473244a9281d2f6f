"""The size of a request's prompts, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specwire.http.bodies.part import RequestBody, invalid

_TOKEN_BYTES = 4
_TEXT_BYTES = 32
"""Counted for each text in addition to its bytes: messages are processed one by one, for each choice."""


def check_size(body: RequestBody, max_prompt_bytes: int, max_total_bytes: int) -> None:
    """Check the size of the prompts, which are sent once for each choice.

    Args:
        max_prompt_bytes: of a prompt as text.
        max_total_bytes: of all choices' prompts.

    Raises:
        ApiError: 400, over one of the limits.
    """
    total = 0
    for prompt in body.prompts:
        texts = list(_texts(prompt))
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > max_prompt_bytes:
            problem = f"{num_bytes} bytes are over the limit of {max_prompt_bytes} bytes"
            raise invalid(next(iter(prompt)), problem)
        total += num_bytes + _TEXT_BYTES * len(texts) + _TOKEN_BYTES * len(prompt.get("prompt_token_ids", ()))
    if total * body.num_choices > max_total_bytes:
        problem = f"choices of {total} bytes of prompts each are over the limit of {max_total_bytes} bytes"
        raise invalid("n", f"{body.num_choices} {problem}")


def _texts(value: Any) -> Iterator[str]:
    """All texts in it; the names of known fields, which are few bytes, are left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from () if name == "prompt_token_ids" else _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
