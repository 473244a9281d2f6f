"""Many streams at once, and a check that each brought every token once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from specwire import AsyncClient, Rule, SamplingParams
from specwire.completion import Chunk, Completion

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many streams, and of how many tokens each."""

    num_streams: int
    num_tokens: int

    def params(self, index: int) -> SamplingParams:
        """Gumbel coupling: the seed alone fixes the text, whatever else runs."""
        return SamplingParams(rule=Rule.GUMBEL, seed=index, max_tokens=self.num_tokens)


@dataclass
class Faults:
    """What must not happen, counted in streams."""

    errors: list[str] = field(default_factory=list)
    num_torn: int = 0
    num_wrong: int = 0


async def generate_all(
    address: str, plan: Plan, faults: Faults, indices: Sequence[int] | None = None
) -> list[list[Chunk | Completion]]:
    """What each stream brought, all at once on one channel; a stream that failed brought nothing."""
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        await client.get_status()
        wanted = range(plan.num_streams) if indices is None else indices
        return await asyncio.gather(*(_generate(client, plan, faults, index) for index in wanted))


async def _generate(client: AsyncClient, plan: Plan, faults: Faults, index: int) -> list[Chunk | Completion]:
    received: list[Chunk | Completion] = []
    try:
        async with client.stream(params=plan.params(index), prompt_token_ids=PROMPT) as stream:
            async for chunk in stream:
                received.append(chunk)
            received.append(stream.completion)
    except Exception as error:  # whatever it is, it is counted
        faults.errors.append(f"stream {index}: {error!r}")
        return []
    return received


def token_ids(received: Sequence[Chunk | Completion]) -> list[int]:
    """All tokens of the stream, as its chunks brought them."""
    chunks = [event for event in received if isinstance(event, Chunk)]
    return [token.token_id for chunk in chunks for token in chunk.tokens]


def is_whole(received: Sequence[Chunk | Completion], num_tokens: int) -> bool:
    """Each token index came once and in order, and then one completion that counts as many."""
    next_index = 0
    for event in received[:-1]:
        if not isinstance(event, Chunk) or event.first_index != next_index:
            return False
        next_index += len(event.tokens)
    last = received[-1] if received else None
    return isinstance(last, Completion) and next_index == num_tokens == last.usage.completion_tokens


def check(
    found: Sequence[Sequence[Chunk | Completion]], texts: Sequence[list[int]], plan: Plan, faults: Faults
) -> None:
    """Count streams that lost or doubled a token, and whole ones that say something else than expected."""
    for received, expected in zip(found, texts, strict=True):
        whole = is_whole(received, plan.num_tokens)
        faults.num_torn += bool(received) and not whole
        faults.num_wrong += whole and token_ids(received) != expected
