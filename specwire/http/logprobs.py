"""Log probabilities in the forms of OpenAI's two APIs. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specwire.completion import Token
from specwire.http.model import Spell

_LEAST = -9999.0
"""Stands for impossible: JSON has no infinity."""


def of_completion(tokens: Sequence[Token], spell: Spell, start: int) -> dict[str, Any]:
    """Four lists over the tokens; the first token of a prompt has no log probability.

    Args:
        spell: text of a token.
        start: characters of the output before these tokens.
    """
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(token.text)
    return {
        "tokens": [spell(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _value(token.logprob) for token in tokens],
        "top_logprobs": [None if token.logprob is None else _alternatives(token, spell) for token in tokens],
        "text_offset": offsets,
    }


def _alternatives(token: Token, spell: Spell) -> dict[str, float]:
    """By text, where the likelier of two tokens with the same text wins; includes the emitted token."""
    found: dict[str, float] = {}
    emitted = (token.token_id, _value(token.logprob))
    for token_id, logprob in (*token.top_logprobs, emitted):
        found.setdefault(spell(token_id), _value(logprob))
    return found


def of_chat(tokens: Sequence[Token], spell: Spell) -> dict[str, Any]:
    """One entry for each token, with the requested number of alternatives."""
    return {"content": [_entry(token, spell) for token in tokens], "refusal": None}


def _entry(token: Token, spell: Spell) -> dict[str, Any]:
    top = [_alternative(spell(token_id), logprob) for token_id, logprob in token.top_logprobs]
    return _alternative(spell(token.token_id), token.logprob) | {"top_logprobs": top}


def _alternative(text: str, logprob: float | None) -> dict[str, Any]:
    """`bytes` is null if the token is only a part of a character."""
    data = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _value(logprob), "bytes": data}


def _value(logprob: float | None) -> float:
    return max(_LEAST, logprob) if logprob is not None else _LEAST
