"""Runs in a pod or on a machine: seeded streams until standard input ends, each compared with the first one.

Arguments: sdk, once or openai, address, number of streams, tokens of each, and prompts, if not these. LOAD_CA
and LOAD_TOKEN_FILE name a client's files, LOAD_SERVER_NAME what the certificate has. Prints `begun`, for each
line of input how many texts are done, and at the end its figures as JSON.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

PROMPTS = ["def fibonacci(", "class Queue:", "import os\n", "for i in range("]
PATIENCE_S = 60.0
"""Longer than a container takes to restart."""
TIMEOUT_S = 600.0
"""Longer than a Ray cluster takes to restart on a busy machine: what is lost is to fail, not what is late."""


class Sdk:
    """Texts as token ids, by the SDK, or by what asks once, over one connection, as most clients of gRPC."""

    def __init__(self, address: str, *, tries_again: bool) -> None:
        from specwire import TLS, AsyncClient, RetryPolicy

        patience_s, max_resumes = (PATIENCE_S, 5) if tries_again else (0.0, 0)
        retry = RetryPolicy(patience_s=patience_s, max_resumes=max_resumes)
        options: dict[str, Any] = {"timeout_s": TIMEOUT_S}
        if authority := os.environ.get("LOAD_CA"):
            token = Path(os.environ["LOAD_TOKEN_FILE"]).read_text().strip()
            name = os.environ.get("LOAD_SERVER_NAME", "")
            options |= {"tls": TLS(ca=authority, server_name=name), "token": token}
        self.client: Any = AsyncClient(address, retry=retry, **options)

    async def parts(self, prompt: str, num_tokens: int) -> AsyncIterator[list[Any]]:
        """Those of a text, as they come."""
        from specwire import Rule, SamplingParams

        params = SamplingParams(max_tokens=num_tokens, rule=Rule.GUMBEL, seed=7)
        async with self.client.stream(prompt, params) as stream:
            async for chunk in stream:
                yield [*chunk.token_ids]


class OpenAI:
    """Texts as characters, by OpenAI's client, which does not try again."""

    def __init__(self, address: str) -> None:
        from openai import AsyncOpenAI

        url = f"http://{address}/v1"
        self.client: Any = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)

    async def parts(self, prompt: str, num_tokens: int) -> AsyncIterator[list[Any]]:
        """Those of a text, as they come."""
        async with await self.client.completions.create(
            model="embedded", prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True
        ) as stream:
            async for event in stream:
                yield [*event.choices[0].text] if event.choices else []


class Load:
    """What became of the texts; see `tests.support.cluster.Load`."""

    def __init__(self, api: Sdk | OpenAI, num_tokens: int) -> None:
        self._api = api
        self._num_tokens = num_tokens
        self._first: dict[str, list[Any]] = {}
        self.done = self._different = 0
        self._failed: collections.Counter[str] = collections.Counter()
        self.longest_pause_s = 0.0

    async def one(self, prompt: str) -> None:
        """Read one to its end."""
        text: list[Any] = []
        last_s = time.monotonic()
        try:
            async for part in self._api.parts(prompt, self._num_tokens):
                now_s = time.monotonic()
                self.longest_pause_s, last_s = max(self.longest_pause_s, now_s - last_s), now_s
                text += part
        except Exception as error:  # whatever it is, it is what the caller would see
            self._failed[f"{type(error).__name__}: {str(error)[:200]}"] += 1
            await asyncio.sleep(0.2)
            return
        self.done += 1
        self._different += text != self._first.setdefault(prompt, text)

    @property
    def figures(self) -> dict[str, Any]:
        """As they are printed."""
        pause_s = round(self.longest_pause_s, 2)
        counts = {"done": self.done, "different": self._different, "failed": self._failed}
        return counts | {"texts": self._first} | {"longest_pause_s": pause_s}


async def main(kind: str, address: str, num_streams: int, num_tokens: int, prompts: list[str]) -> None:
    """First each prompt once, then all streams."""
    ended = threading.Event()
    api = OpenAI(address) if kind == "openai" else Sdk(address, tries_again=kind == "sdk")
    load = Load(api, num_tokens)

    def listen() -> None:
        for _ in sys.stdin:
            print(load.done, flush=True)
        ended.set()

    threading.Thread(target=listen, daemon=True).start()

    async def stream(number: int) -> None:
        while not ended.is_set():
            await load.one(prompts[number % len(prompts)])
            number += 1

    async with api.client:
        for prompt in prompts:
            await load.one(prompt)
        load.longest_pause_s = 0.0
        print("begun", flush=True)
        await asyncio.gather(*map(stream, range(num_streams)))
    print(json.dumps(load.figures))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:] or PROMPTS))
