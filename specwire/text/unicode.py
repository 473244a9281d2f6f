"""Texts that can be sent: Python's may have halves of characters. A leaf."""

from __future__ import annotations

HALVED = "has half of a character: a surrogate without its other one"


def is_whole(text: str) -> bool:
    """Whether each surrogate has its other one, so that UTF-8 can hold the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
