"""A client that gets little processor time is not lost."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time

import pytest

from tests.support.harness import local_stack

CLIENT = """
import asyncio, json, sys
from specwire import AsyncClient, SamplingParams

async def main():
    params = SamplingParams(max_tokens=int(sys.argv[2]), ignore_eos=True, seed=1, rule="gumbel")
    async with AsyncClient(sys.argv[1], timeout_s=300) as client:
        async with client.stream(params=params, prompt_token_ids=[1, 2, 3]) as stream:
            await anext(stream)
            print("begun", flush=True)
            async for _ in stream:
                pass
        print(json.dumps([stream.num_resumes, len(stream.tokens)]))

asyncio.run(main())
"""
NUM_TOKENS = 300


@pytest.mark.parametrize(
    ("stopped_s", "running_s", "num_times"),
    [(3.5, 0.1, 1), pytest.param(4.9, 0.1, 12, marks=pytest.mark.slow)],
    ids=["3.5 s", "2 % of a core for a minute"],
)
def test_stopped_again_and_again(stopped_s: float, running_s: float, num_times: int) -> None:
    with local_stack("emulated:step_ms=5") as stack:
        command = [sys.executable, "-c", CLIENT, stack.address, str(NUM_TOKENS * num_times)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            try:
                assert client.stdout is not None
                assert client.stdout.readline() == "begun\n"
                for _ in itertools.repeat(None, num_times):
                    client.send_signal(signal.SIGSTOP)
                    time.sleep(stopped_s)
                    client.send_signal(signal.SIGCONT)
                    time.sleep(running_s)
                assert json.loads(client.stdout.read()) == [0, NUM_TOKENS * num_times]
            finally:
                client.kill()
