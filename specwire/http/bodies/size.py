"""The size of a request's prompts, in bytes."""

from __future__ import annotations

from typing import Any

from specwire.http.bodies.part import Request, invalid

_TOKEN_BYTES = 4
_TEXT_BYTES = 32
"""Counted for each text in addition to its bytes: messages are processed one by one, for each choice."""


def check_size(body: Request, max_prompt_bytes: int, max_total_bytes: int) -> None:
    """Check the size of the prompts, which are sent once for each choice.

    Args:
        max_prompt_bytes: of a prompt as text.
        max_total_bytes: of all choices' prompts.

    Raises:
        ApiError: 400, over one of the limits.
    """
    total = 0
    for prompt in body.prompts:
        [(form, content)] = prompt.items()
        texts = _texts(form, content)
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > max_prompt_bytes:
            raise invalid(form, f"{num_bytes} bytes are over the limit of {max_prompt_bytes} bytes")
        total += num_bytes + (_TEXT_BYTES * len(texts) if texts else _TOKEN_BYTES * len(content))
    if total * body.num_choices > max_total_bytes:
        problem = f"choices of {total} bytes of prompts each are over the limit of {max_total_bytes} bytes"
        raise invalid("n", f"{body.num_choices} {problem}")


def _texts(form: str, content: Any) -> list[str]:
    if form == "messages":
        return [text for message in content for text in message.values()]
    return [content] if form == "prompt" else []
