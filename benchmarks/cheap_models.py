"""Draft and verify without models, for greedy streams: a pass answers all that has arrived, in numpy.

They speak the protocol of the model services and cost a few microseconds a round, so what is measured on
them is the coordinator. Run as a program, they write their address, then for each line that they are sent
one with the number of rounds that were verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
import numpy as np

from specwire.core import ModelInfo
from specwire.support import IntArray
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from specwire.wire import model as wire

DRAFT_S, TARGET_S = 0.002, 0.01
"""Of a pass: all draft tokens of a round, or a verdict on them."""
ALPHA = 0.8
"""Probability that a draft token is the target's."""
VOCAB_SIZE = 1000
_INFO = wire.model_info_to_proto(ModelInfo(name="cheap", vocab_size=VOCAB_SIZE, context_len=1 << 30))


class Draft(draft_pb2_grpc.DraftServiceServicer):
    """Proposes as many tokens as are asked for."""

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # noqa: N802
        """A message after each pass."""
        await _each_pass(requests, DRAFT_S, lambda arrived: context.write(_proposals(arrived)))

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The handshake."""
        return draft_pb2.DraftServiceGetModelInfoResponse(model=_INFO)


class Verify(verify_pb2_grpc.VerifyServiceServicer):
    """Accepts each token with probability `ALPHA`.

    Attributes:
        num_rounds: requests that were answered.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        self._rng = np.random.default_rng(0)

    async def Verify(self, requests: AsyncIterator[verify_pb2.VerifyRequest], context: Any) -> None:  # noqa: N802
        """A message after each pass."""
        await _each_pass(requests, TARGET_S, lambda arrived: context.write(self._verdicts(arrived)))

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The handshake."""
        return verify_pb2.VerifyServiceGetModelInfoResponse(model=_INFO)

    def _verdicts(self, arrived: Sequence[verify_pb2.VerifyRequest]) -> verify_pb2.VerifyResponse:
        drafted = np.frombuffer(b"".join(each.draft_token_ids for each in arrived), "<u4")
        request = _together(arrived)
        num = len(request.sequence_ids)
        self.num_rounds += num
        num_rows = np.array(request.num_draft_tokens) + 1
        is_last = np.zeros(num_rows.sum(), np.bool_)
        is_last[num_rows.cumsum() - 1] = True
        is_accepted = self._rng.random(len(drafted)) < ALPHA
        targets = np.ones(len(is_last), "<i4")
        targets[~is_last] = np.where(is_accepted, drafted, (drafted + 1) % VOCAB_SIZE)
        return verify_pb2.VerifyResponse(
            load=common_pb2.Load(num_sequences=num),
            sequence_ids=request.sequence_ids,
            request_ids=request.request_ids,
            base_lens=_ends(request),
            timings=_no_timings(num),
            num_cached_tokens=[0] * num,
            num_rows=num_rows.tolist(),
            target_token_ids=targets.tobytes(),
        )


def _proposals(arrived: Sequence[draft_pb2.DraftRequest]) -> draft_pb2.DraftResponse:
    request = _together(arrived)
    num, counts = len(request.sequence_ids), request.num_draft_tokens
    token_ids = np.arange(sum(counts)) % VOCAB_SIZE
    return draft_pb2.DraftResponse(
        sequence_ids=request.sequence_ids,
        request_ids=request.request_ids,
        base_lens=_ends(request),
        timings=_no_timings(num),
        num_cached_tokens=[0] * num,
        begun_ahead=[False] * num,
        proposals=common_pb2.Proposals(num_tokens=counts, token_ids=token_ids.astype("<i4").tobytes()),
    )


async def _each_pass(
    requests: AsyncIterator[Any], pass_s: float, answer: Callable[[Sequence[Any]], Any]
) -> None:
    """Answer what has arrived since the last pass, until the stream ends."""
    arrived: list[Any] = []

    async def read() -> None:
        async for request in requests:
            if request.sequence_ids:
                arrived.append(request)

    reading = asyncio.create_task(read())
    try:
        while not reading.done():
            await asyncio.sleep(pass_s)
            if arrived:
                taken, arrived = arrived, []
                await answer(taken)
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


def _together(arrived: Sequence[Any]) -> Any:
    """One message with their columns of numbers."""
    request, *others = arrived
    for other in others:
        request.MergeFrom(other)
    return request


def _ends(request: Any) -> list[int]:
    """Committed lengths of the requests."""
    ends: IntArray = np.add(request.base_lens, request.num_tokens)
    return ends.tolist()


def _no_timings(num: int) -> common_pb2.Timings:
    nothing = [0] * num
    return common_pb2.Timings(
        queue_ns=nothing, forward_ns=nothing, residence_ns=nothing, stall_ns=nothing, ahead_ns=nothing
    )


async def _serve() -> None:
    server, verify = grpc.aio.server(), Verify()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(Draft(), server)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(verify, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(verify.num_rounds, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
