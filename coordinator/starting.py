"""What a coordinator's log says of its start: what it waits for, and what it found."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from coordinator.peers.handshake import DraftPool, VerifyPool
from specwire.config.services import CoordinatorConfig
from specwire.telemetry.logs import NOTICE

log = logging.getLogger(__name__)

_AT_ONCE_S = 0.5
"""Services that are there answer within this time, and nothing is said of a wait."""
_AGAIN_S = 10.0


@contextlib.asynccontextmanager
async def waiting_for(config: CoordinatorConfig, verify: VerifyPool) -> AsyncIterator[None]:
    """Say now and then what is waited for while the body runs."""
    saying = asyncio.create_task(_say(config, verify))
    try:
        yield
    finally:
        saying.cancel()


async def _say(config: CoordinatorConfig, verify: VerifyPool) -> None:
    await asyncio.sleep(_AT_ONCE_S)
    draft = f", draft at {config.draft_address}" if config.draft_address else ""
    patience = f"for {config.connect_timeout_s:g} s, and as long as it loads its model"
    log.log(NOTICE, "waiting for verify at %s%s, %s", config.verify_address, draft, patience)
    while True:
        await asyncio.sleep(_AGAIN_S)
        log.log(NOTICE, "still waiting: %s", verify.unavailable)


def log_found(config: CoordinatorConfig, verify: VerifyPool, draft: DraftPool) -> None:
    """Say what serves, and how requests are served that leave it open."""
    log.log(NOTICE, "target %s at %s", verify.info.summary, config.verify_address)
    if draft.info is not None:
        log.log(NOTICE, "draft %s at %s", draft.info.summary, config.draft_address)
    elif config.draft_address:
        log.log(NOTICE, "no draft yet at %s: decoding plainly until it serves", config.draft_address)
    given = config.own_draft.source if config.own_draft else config.text_draft and config.text_draft.method
    log.log(
        NOTICE,
        "rule %s; draft tokens a round %s%s",
        config.rule,
        config.num_draft_tokens,
        f"; drafts by {given}" if given else "",
    )
