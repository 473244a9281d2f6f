"""Results on their way from the engine thread to the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, cast

from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.replies import Replies, Result

MS = 1_000_000


async def test_results_that_nobody_waits_for_are_held_for_a_frame() -> None:
    """And come in the order of their passes, to sinks that expect a job once they know the one before it."""
    replies, told = Replies(), list[str]()
    jobs = [Job(cast(TokenSequence, None), 0, (), result=name) for name in "abcd"]
    following = dict(itertools.pairwise(jobs))

    def sink(results: Sequence[Result]) -> None:
        for job, result in results:
            told.append(cast(Any, result))
            if job in following:
                replies.expect(following[job], sink)

    replies.expect(jobs[0], sink)
    for number, job in enumerate(jobs[:3]):  # passes of 5 ms; a fourth one would end too late
        replies.resolve([job])
        replies.hold(5 * MS * (1 + number), 5 * MS)
        assert replies.is_held is (number < 3)
    await asyncio.sleep(0)
    assert told == []
    replies.hold(20 * MS, 5 * MS)
    await asyncio.sleep(0)
    assert told == ["a", "b", "c"]
    assert not replies.is_held
    replies.resolve([jobs[3]])
    replies.hold(25 * MS, 20 * MS)  # a pass longer than a frame is not waited for
    await asyncio.sleep(0)
    assert told == ["a", "b", "c", "d"]
