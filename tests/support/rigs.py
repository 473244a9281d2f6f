"""Three services on emulated devices, with a link of its own between each two that talk to each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire import Client, Rule, SamplingParams, SpecwireError
from specwire.config.link import Link
from tests.support.faulty_proxy import FaultyProxy
from tests.support.harness import LocalStack, LoopThread, StackProxy, local_stack

TARGET, DRAFT = "emulated:step_ms=20", "emulated:step_ms=1,alpha=0.8"
PROMPT = (1, 2, 3)
PARAMS = SamplingParams(max_tokens=60, rule=Rule.GUMBEL, seed=5)
"""Half a second of work; the rule fixes the text, even when the draft fails."""
LINKS = ("client", "draft", "verify")
"""From each of them to the coordinator."""
HEAL_S = 30.0


@dataclass(frozen=True)
class Ending:
    """How a request ended.

    Attributes:
        token_ids: that came, each index once.
        status: OK, or that of the error.
        elapsed_s: from the request to its end.
        gap_s: the longest wait for a message.
    """

    token_ids: tuple[int, ...]
    status: str
    elapsed_s: float
    gap_s: float


class Rig:
    """A running stack whose client is behind a link, too."""

    def __init__(self, stack: LocalStack, client: Client, client_proxy: StackProxy) -> None:
        assert stack.draft_proxy is not None
        assert stack.verify_proxy is not None
        self.stack = stack
        self.client = client
        self.proxies = {"client": client_proxy, "draft": stack.draft_proxy, "verify": stack.verify_proxy}
        self.expected = stack.client.generate(prompt_token_ids=PROMPT, params=PARAMS).token_ids

    def request(self, timeout_s: float) -> Ending:
        """One request, read to its end, whatever that is."""
        return read(self.client, PARAMS, timeout_s)

    def heal_time_s(self) -> float:
        """From now until the first request that is served as ever."""
        started_s = time.monotonic()
        while (ending := self.request(HEAL_S)).status != "OK":
            assert time.monotonic() - started_s < HEAL_S, ending
            time.sleep(0.1)
        assert ending.token_ids == self.expected
        return time.monotonic() - started_s - ending.elapsed_s

    def serving(self) -> dict[str, bool]:
        """What each service says of its health, asked past the links."""
        stack = self.stack
        addresses = {"client": stack.address, "draft": stack.draft_address, "verify": stack.verify_address}
        return {name: is_serving(address) for name, address in addresses.items()}


def read(
    client: Client, params: SamplingParams, timeout_s: float, started: threading.Event | None = None
) -> Ending:
    """A request, read to its end; `started` is set as soon as something came."""
    started_s = last_s = time.monotonic()
    gap_s = 0.0
    token_ids: list[int] = []
    status = "OK"
    try:
        with client.stream(params=params, prompt_token_ids=PROMPT, timeout_s=timeout_s) as stream:
            for chunk in stream:
                gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
                assert chunk.first_index == len(token_ids)
                token_ids += [token.token_id for token in chunk.tokens]
                if started is not None:
                    started.set()
            assert stream.completion.token_ids == tuple(token_ids)
    except SpecwireError as error:
        status = error.status
    now_s = time.monotonic()
    return Ending(tuple(token_ids), status, now_s - started_s, max(gap_s, now_s - last_s))


def is_serving(address: str) -> bool:
    """What the service there says of its health."""
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextlib.contextmanager
def rig() -> Iterator[Rig]:
    """Links that add nothing, as yet."""
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(
            local_stack(
                TARGET,
                DRAFT,
                draft_link=Link(),
                verify_link=Link(),
                coordinator_options={"draft_timeout_ms": 1000.0},
            )
        )
        thread = LoopThread()
        stack.callback(thread.close)
        proxy = FaultyProxy(running.address, Link())
        address = stack.enter_context(thread.entered(lambda: proxy))
        client = stack.enter_context(Client(address))
        yield Rig(running, client, StackProxy(proxy, thread, address))
