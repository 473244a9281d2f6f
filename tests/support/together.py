"""Generations at the same time, over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from specwire import AsyncClient, Completion, SamplingParams


def together(address: str, requests: Iterable[tuple[SamplingParams, Sequence[int]]]) -> list[Completion]:
    """One completion for each of them and its prompt."""

    async def all_of_them() -> list[Completion]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(
                *(client.generate(params=params, prompt_token_ids=prompt) for params, prompt in requests)
            )

    return asyncio.run(all_of_them())


def generated(address: str, requests: Iterable[SamplingParams], prompt: Sequence[int]) -> list[Completion]:
    """One completion for each of them."""
    return together(address, [(params, prompt) for params in requests])


def sampled(
    address: str, params: SamplingParams, seeds: Iterable[int], prompt: Sequence[int]
) -> list[Completion]:
    """One completion for each seed."""
    return generated(address, [replace(params, seed=seed) for seed in seeds], prompt)


def of_prompts(address: str, params: SamplingParams, prompts: Iterable[Sequence[int]]) -> list[Completion]:
    """One completion for each prompt."""
    return together(address, [(params, prompt) for prompt in prompts])
