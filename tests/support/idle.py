"""Until nothing is held anywhere."""

from __future__ import annotations

import asyncio
import time

from specwire import AsyncClient
from specwire.cli.supervisor import Stack
from tests.support.harness import handshake

_PATIENCE_S = 30.0


async def until_idle(client: AsyncClient, stack: Stack) -> None:
    """No generation runs or waits, and no sequence and no page is held."""
    assert stack.draft is not None
    models = (("verify", stack.verify.address), ("draft", stack.draft.address))
    ends_s = time.monotonic() + _PATIENCE_S
    while True:
        statuses = [(await asyncio.to_thread(handshake, *each)).status for each in models]
        status = await client.get_status()
        held = sum(one.num_sequences + one.num_held_pages + one.num_requests for one in statuses)
        if not held + status.num_running + status.num_waiting + status.num_paused:
            return
        assert time.monotonic() < ends_s, f"still held: {statuses}, {status}"
