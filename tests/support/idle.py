"""How long until nothing is held anywhere."""

from __future__ import annotations

import time

import grpc

from specwire import AsyncClient
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
_PATIENCE_S = 30.0


class Engines:
    """The engines' own counts, asked over the wire."""

    def __init__(self, verify_address: str, draft_address: str) -> None:
        self._channels = [grpc.aio.insecure_channel(address) for address in (verify_address, draft_address)]
        self._verify = verify_pb2_grpc.VerifyServiceStub(self._channels[0])
        self._draft = draft_pb2_grpc.DraftServiceStub(self._channels[1])

    async def statuses(self) -> list[common_pb2.EngineStatus]:
        """Of verify and draft."""
        verify = await self._verify.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=5)
        draft = await self._draft.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=5)
        return [verify.status, draft.status]

    async def aclose(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()


async def idle_after_s(client: AsyncClient, engines: Engines) -> float:
    """Seconds until no generation runs or waits, and no sequence and no page is held.

    Raises:
        RuntimeError: that takes longer than anybody would wait.
    """
    started_s = time.perf_counter()
    while True:
        statuses, status = await engines.statuses(), await client.get_status()
        held = sum(one.num_sequences + one.num_held_pages + one.num_requests for one in statuses)
        elapsed_s = time.perf_counter() - started_s
        if not held + status.num_running + status.num_waiting + status.num_paused:
            return elapsed_s
        if elapsed_s > _PATIENCE_S:
            raise RuntimeError(f"still held after {elapsed_s:.0f} s: {statuses}, {status}")
