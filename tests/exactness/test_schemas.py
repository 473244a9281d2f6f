"""Every output under a JSON schema parses and validates, by a library that knows nothing of masks.

A text may end at the limit of tokens: it is a beginning then, and counted. `make test` has one schema, in
`test_http_structured.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import jsonschema
import pytest

from specwire import AsyncClient, Completion, FinishReason, Grammar, Rule, SamplingParams, embedded
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack
from tests.support.schemas import Schema, random_document

MAX_TOKENS = 400
RULES = (Rule.BLOCK, Rule.GUMBEL, Rule.REJECTION)
NUM_SCHEMAS = 500
stack = entered(lambda: local_stack(embedded.TARGET_DIR, embedded.DRAFT_DIR))


def written(stack: LocalStack, schemas: Sequence[Schema]) -> list[Completion]:
    """A text for each, 16 at a time."""
    free = asyncio.Semaphore(16)

    async def one(client: AsyncClient, number: int, schema: Schema) -> Completion:
        grammar = Grammar(json_schema=schema)
        rule = RULES[number % len(RULES)]
        async with free:
            params = SamplingParams(grammar=grammar, max_tokens=MAX_TOKENS, seed=number, rule=rule)
            return await client.generate("record = ", params)

    async def every() -> list[Completion]:
        async with AsyncClient(stack.address) as client:
            return await asyncio.gather(*(one(client, *each) for each in enumerate(schemas)))

    return asyncio.run(every())


@pytest.mark.slow
def test_every_output_validates(stack: LocalStack) -> None:
    rng = random.Random(7)
    schemas = [random_document(rng) for _ in range(NUM_SCHEMAS)]
    texts = written(stack, schemas)
    whole = [done.finish_reason is FinishReason.STOP for done in texts]
    print(f"{NUM_SCHEMAS - sum(whole)} of {NUM_SCHEMAS} texts end by length")
    assert sum(whole) >= 0.9 * NUM_SCHEMAS
    for schema, done, is_whole in zip(schemas, texts, whole, strict=True):
        if is_whole:
            jsonschema.validate(json.loads(done.text), schema)
    accepted = sum(done.speculation.num_accepted_tokens for done in texts)
    assert accepted > 0.5 * sum(done.speculation.num_draft_tokens for done in texts)
