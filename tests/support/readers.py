"""Clients that read generations, over gRPC and over HTTP, and what they see of faults."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx2

from specwire import AsyncClient, Fate, Rule, SamplingParams

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Load:
    """Clients with so many requests each, one after the other; the seed names a request.

    Attributes:
        max_depth: of token trees; 0 for chains. The text is the same.
    """

    num_clients: int
    num_requests: int
    num_tokens: int = 60
    max_depth: int = 0

    def params(self, client: int, request: int) -> SamplingParams:
        """Of one request; its text is fixed by them."""
        seed = 1000 * client + request % 5
        return SamplingParams(
            max_tokens=self.num_tokens,
            seed=seed,
            rule=Rule.GUMBEL,
            num_draft_tokens=16 if self.max_depth else None,
            max_depth=self.max_depth,
        )

    @property
    def num_all(self) -> int:
        """Requests of all clients."""
        return self.num_clients * self.num_requests


@dataclass
class Seen:
    """What the clients saw.

    Attributes:
        num_begun: requests of which a chunk came.
        num_done: requests that ended with all of their text.
        num_accepted: draft tokens in the chunks so far.
        num_resumes: of all requests that ended with all of their text.
        longest_gap_s: longest time between two chunks, or between a request and its first.
        texts: token ids by seed; a request that says something else than one before it is an error.
        partial: token ids by seed, of requests that ended with an error.
        errors: what went wrong, in words.
    """

    num_begun: int = 0
    num_done: int = 0
    num_chunks: int = 0
    num_accepted: int = 0
    num_resumes: int = 0
    longest_gap_s: float = 0.0
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    partial: dict[int, tuple[int, ...]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """Of a generation: a chunk, or, without tokens, its end.

    Attributes:
        tokens: id, and whether it was drafted.
    """

    first_index: int
    tokens: list[tuple[int, bool]]
    num_resumes: int = 0


Read = Callable[[SamplingParams], AsyncGenerator[Piece]]


async def run(address: str, load: Load, seen: Seen | None = None, **client: Any) -> Seen:
    """The load, over gRPC."""
    async with AsyncClient(address, **{"timeout_s": TIMEOUT_S} | client) as to:
        return await _run(lambda params: _grpc(to, params), load, seen)


async def run_http(address: str, load: Load, seen: Seen | None = None) -> Seen:
    """The load, over the HTTP front at this address."""
    async with httpx2.AsyncClient(base_url=f"http://{address}/v1", timeout=TIMEOUT_S) as to:
        return await _run(lambda params: _http(to, params), load, seen)


async def _run(read: Read, load: Load, seen: Seen | None) -> Seen:
    seen = seen or Seen()
    await asyncio.gather(*(_client(read, load, i, seen) for i in range(load.num_clients)))
    return seen


async def _grpc(client: AsyncClient, params: SamplingParams) -> AsyncGenerator[Piece]:
    async with client.stream(params=params, prompt_token_ids=_prompt(params)) as stream:
        async for chunk in stream:
            tokens = [(token.token_id, token.fate is Fate.ACCEPTED) for token in chunk.tokens]
            yield Piece(chunk.first_index, tokens)
        yield Piece(len(stream.completion.token_ids), [], stream.completion.num_resumes)


async def _http(client: httpx2.AsyncClient, params: SamplingParams) -> AsyncGenerator[Piece]:
    wanted = {"model": "m", "prompt": _prompt(params), "stream": True, "return_fates": True}
    wanted |= {"max_tokens": params.max_tokens, "seed": params.seed, "rule": params.rule}
    num_tokens = 0
    async with client.stream("POST", "/completions", json=wanted) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
            for part in (one["specwire"] for one in choices if "specwire" in one):
                tokens = [(token["id"], token["fate"] == Fate.ACCEPTED.value) for token in part["tokens"]]
                num_tokens += len(tokens)
                yield Piece(part["first_index"], tokens)
    yield Piece(num_tokens, [])


def _prompt(params: SamplingParams) -> list[int]:
    assert params.seed is not None
    return [params.seed % 60 + 1, 2, 3]


async def _client(read: Read, load: Load, index: int, seen: Seen) -> None:
    for request in range(load.num_requests):
        params, token_ids = load.params(index, request), list[int]()
        assert params.seed is not None
        try:
            await _request(read, params, token_ids, seen)
        except Exception as error:
            seen.errors.append(f"{type(error).__name__}: {error}")
            seen.partial[params.seed] = tuple(token_ids)


async def _request(read: Read, params: SamplingParams, token_ids: list[int], seen: Seen) -> None:
    last_s = time.monotonic()
    async with aclosing(read(params)) as pieces:
        async for piece in pieces:
            now_s = time.monotonic()
            seen.longest_gap_s, last_s = max(seen.longest_gap_s, now_s - last_s), now_s
            seen.num_begun += not token_ids and bool(piece.tokens)
            seen.num_chunks += bool(piece.tokens)
            if piece.first_index != len(token_ids):
                seen.errors.append(f"index {piece.first_index} instead of {len(token_ids)}")
            token_ids += [token_id for token_id, _ in piece.tokens]
            seen.num_accepted += sum(is_accepted for _, is_accepted in piece.tokens)
            seen.num_resumes += piece.num_resumes
    if len(token_ids) != params.max_tokens:
        seen.errors.append(f"{len(token_ids)} tokens instead of {params.max_tokens}")
    assert params.seed is not None
    if seen.texts.setdefault(params.seed, tuple(token_ids)) != tuple(token_ids):
        seen.errors.append(f"another text for seed {params.seed}")
    seen.num_done += 1
