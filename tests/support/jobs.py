"""Jobs of an engine by themselves, without a stream that they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from specwire.engine.jobs import Job
from specwire.engine.loop import Engine
from specwire.engine.replies import Result


def submitted(
    engine: Engine, job: Job, extra_len: int = 0, *, background: bool = False
) -> asyncio.Future[Any]:
    """What becomes of a job, as a future."""
    future = asyncio.get_running_loop().create_future()

    def settle(results: Sequence[Result]) -> None:
        [(_, result)] = results
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    engine.submit(job, settle, extra_len, background=background)
    return future


async def result_of(engine: Engine, job: Job, extra_len: int = 0) -> Any:
    """The job's result.

    Raises:
        SpecwireError: what it failed with.
    """
    return await submitted(engine, job, extra_len)
