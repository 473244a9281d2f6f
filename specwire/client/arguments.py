"""Checks of what callers pass to the clients: each error names the argument and says what to pass instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from specwire.config.fields import LONGEST, split_addresses
from specwire.core import SamplingParams
from specwire.errors import ConfigError, InvalidRequestError
from specwire.telemetry.propagation import REQUEST_ID, W3C, TraceContext
from specwire.text.unicode import HALVED, is_whole

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int]
_PARAMS = frozenset(field.name for field in fields(SamplingParams))


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of coordinators, given as `a:1,b:2` or as a sequence.

    Raises:
        InvalidRequestError: there is none, or one is not HOST:PORT.
    """
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",")]
    found = tuple(given) if isinstance(given, Sequence) else (given,)
    if not found:
        raise InvalidRequestError("address", "empty", "at least one HOST:PORT is required")
    for each in found:
        try:
            if not isinstance(each, str):
                raise ConfigError
            split_addresses("address", each)
        except ConfigError:
            raise InvalidRequestError("address", each, f"is not HOST:PORT{_hint(each)}") from None
    return found


def _hint(address: object) -> str:
    """What was meant by an address that is none."""
    if not isinstance(address, str):
        return ""
    if url := re.fullmatch(r"https?://([^/]+:[0-9]+)(/.*)?", address):
        return f"; this is gRPC, without a scheme: {url[1]} if the coordinator listens there"
    return f"; did you mean {address}:7070?" if re.fullmatch(r"[\w.-]*\w", address) else ""


def prompt(given: object) -> None:
    """Refuse a prompt that is no text.

    Raises:
        InvalidRequestError: says which argument or method takes it.
    """
    if isinstance(given, str) and not is_whole(given):
        raise InvalidRequestError("prompt", given, HALVED)
    if given is None or isinstance(given, str):
        return
    kinds = set(map(type, given)) if isinstance(given, list | tuple) else set()
    instead = {
        str: "generate_many takes several prompts",
        int: "give token ids as prompt_token_ids=[...]",
        dict: "give messages as messages=[...]",
    }
    hint = instead.get(kinds.pop(), "") if len(kinds) == 1 else ""
    problem = f"is of type {type(given).__name__}, and not a text"
    raise InvalidRequestError("prompt", given, f"{problem}; {hint}" if hint else problem)


def params(given: object) -> SamplingParams:
    """The parameters; the default ones for None.

    Raises:
        InvalidRequestError: they are of another type.
    """
    if given is not None and not isinstance(given, SamplingParams):
        problem = f"is of type {type(given).__name__}; give SamplingParams(temperature=0.7, max_tokens=64)"
        raise InvalidRequestError("params", given, problem)
    return given or SamplingParams()


def options(given: Mapping[str, Any]) -> None:
    """Refuse parameters of the generation among the options of a call.

    Raises:
        InvalidRequestError: names the first.
    """
    for name in given:
        if name in _PARAMS:
            problem = f"belongs into SamplingParams: generate(prompt, SamplingParams({name}=...))"
            raise InvalidRequestError(name, given[name], problem)


def many(
    prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[str | None, Sequence[int] | None, SamplingParams]]:
    """Text, token ids and parameters of each of several prompts.

    Raises:
        InvalidRequestError: the prompts are no list, or there are not as many parameters.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        raise InvalidRequestError("prompts", prompts, "is no list of prompts; generate takes a single one")
    each = given if isinstance(given, list | tuple) else [given] * len(prompts)
    if len(each) != len(prompts):
        problem = f"{len(each)} for {len(prompts)} prompts; give one for all, or one for each"
        raise InvalidRequestError("params", each, problem)
    return [
        (text, None, params(one)) if isinstance(text, str) else (None, text, params(one))
        for text, one in zip(prompts, each, strict=True)
    ]


def parent(given: str | TraceContext) -> TraceContext:
    """The caller's context; a malformed one begins a new trace."""
    context = given if isinstance(given, TraceContext) else TraceContext(given)
    return W3C.read(W3C.headers(context))


def request_id(given: str) -> str:
    """The caller's name of a request; raises InvalidRequestError."""
    if given and not (isinstance(given, str) and REQUEST_ID.fullmatch(given)):
        raise InvalidRequestError("request_id", given, "is not 1 to 128 letters, digits and ._:/-")
    return given


def timeout(given: float) -> float:
    """A timeout in seconds; raises InvalidRequestError."""
    if not (isinstance(given, int | float) and 0 < given <= LONGEST):
        raise InvalidRequestError("timeout_s", given, f"must be a number over 0, at most {LONGEST:g}")
    return given


def concurrency(given: int) -> int:
    """How many generations may run at a time; raises InvalidRequestError."""
    if type(given) is not int or given < 1:
        raise InvalidRequestError("max_concurrent", given, "must be a whole number over 0")
    return given
