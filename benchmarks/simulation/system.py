"""Coordinator, verify and draft service put together in one simulated world."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from benchmarks.simulation.devices import (
    Device,
    GreedyDrafts,
    GreedyVerdicts,
    LogitsDecider,
    StepCost,
    VirtualEngine,
    VirtualRunner,
)
from benchmarks.simulation.network import Link, Overheads, Process, VirtualCall
from coordinator.peers.handshake import DraftPool, VerifyPool
from coordinator.peers.link import SharedLink, draft_codec, verify_codec
from coordinator.peers.replicas import Replica
from coordinator.servicer import GenerationServicer
from draft_service.drafter import DraftDecider
from draft_service.servicer import DraftServicer
from specwire.config.services import CoordinatorConfig, DraftConfig
from specwire.core import MAX_AT_ONCE, MAX_NUM_OUTCOMES, ModelInfo
from specwire.engine.boot import ModelService
from specwire.engine.device import Decider
from specwire.engine.emulated import EmulatedModel
from specwire.engine.measuring import as_load
from specwire.telemetry import tracing
from specwire.v1 import generation_pb2
from verify_service.servicer import VerifyServicer
from verify_service.verifier import VerifyDecider

_NO_TRACING = tracing.Tracing()
_UNLIMITED = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A world to be simulated: a coordinator, its verify service, and a draft service.

    Attributes:
        model: the emulated draft; the target is the same with alpha 1.
        target, draft: costs of a pass of each.
        slowdown: of a pass of either while the other's runs as well; 1 where each has a device of its own.
        num_draft_tokens: a round; `auto` lets the coordinator choose.
        num_outcomes: to prepare for; `auto` lets it find out.
        max_depth: longest path of token trees, 0 for chains; `auto` lets it find out.
        speculative_config: drafts from text, as of the coordinator's flag.
        link: between coordinator and draft; coordinator and verify service are neighbours.
        exact: real sampling code; needed for any rule but greedy.
    """

    model: EmulatedModel
    target: StepCost
    draft: StepCost
    slowdown: float = 1.0
    num_draft_tokens: str = "auto"
    num_outcomes: str = "auto"
    max_depth: str = "auto"
    speculative_config: str = ""
    link: Link = field(default_factory=Link)
    overheads: Overheads = field(default_factory=Overheads)
    exact: bool = False


class _Service:
    """A model service in a process of its own, on a simulated device.

    Attributes:
        knows_costs: whether the engine begins with the costs that it says, as `boot` has it.
    """

    knows_costs = False

    def __init__(
        self, setting: Setting, model: EmulatedModel, decider: Decider, cost: StepCost, device: Device
    ) -> None:
        runner = VirtualRunner(model, cost, exact=setting.exact)
        self.process = Process(setting.overheads.message_ms)
        costs = cost.measured()
        known = costs if self.knows_costs else None
        self.engine = VirtualEngine(runner, decider, model.context_len, device, known)
        self.info = ModelInfo(
            name=f"alpha={model.alpha:g}",
            vocab_size=model.vocab_size,
            context_len=model.context_len,
            prepares_outcomes=True,
            trees=True,
            devices=("shared",) if setting.slowdown > 1 else (),
            costs=as_load(costs, None),
        )
        self.service = ModelService(self.engine, runner, self.info, _UNLIMITED)


class VerifyService(_Service):
    """The real servicer and engine."""

    knows_costs = True

    def __init__(self, setting: Setting, device: Device) -> None:
        model = replace(setting.model, alpha=1.0, period=0)
        fast = LogitsDecider(GreedyVerdicts(model).consume)
        decider = VerifyDecider() if setting.exact else fast
        super().__init__(setting, model, decider, setting.target, device)
        servicer = VerifyServicer(_NO_TRACING)
        servicer.service = self.service
        self.handler = servicer.Verify


class DraftService(_Service):
    """The real servicer, lookahead and engine."""

    def __init__(self, setting: Setting, device: Device) -> None:
        fast = LogitsDecider(GreedyDrafts(setting.model).consume)
        config = DraftConfig(max_outcomes=MAX_NUM_OUTCOMES)
        decider = DraftDecider(config) if setting.exact else fast
        super().__init__(setting, setting.model, decider, setting.draft, device)
        servicer = DraftServicer(
            self.service, _NO_TRACING, max_outcomes=config.max_outcomes, max_support=config.max_support
        )
        self.handler = servicer.Draft


class _Replica(Replica):
    """No channel: its stream is a simulated one."""

    def __init__(self, role: str, info: ModelInfo, open_link: Callable[[], SharedLink]) -> None:
        super().__init__(role, role)
        self._open = open_link
        self.mark_ready(info)

    def _open_link(self) -> SharedLink:
        return self._open()


class Coordinator:
    """The real servicer, without a server."""

    def __init__(self, setting: Setting, verify: VerifyService, draft: DraftService) -> None:
        self._setting, self._verify, self._draft = setting, verify, draft
        message_ms = setting.overheads.message_ms
        self._process, self._client_process = Process(message_ms), Process(message_ms)
        config = CoordinatorConfig(
            verify_address="127.0.0.1:1",
            draft_address="127.0.0.1:1",
            num_draft_tokens=setting.num_draft_tokens,
            num_outcomes=setting.num_outcomes,
            max_depth=setting.max_depth,
            speculative_config=setting.speculative_config,
            max_running=MAX_AT_ONCE,
        )
        target = verify.info
        verify_pool = VerifyPool("")
        verify_pool.add(_Replica("verify", target, self._open_verify))
        verify_pool.check_info(target)
        draft_pool = DraftPool(config, target)
        draft_pool.add(_Replica("draft", draft.info, self._open_draft))
        self._generate = GenerationServicer(config, verify_pool, draft_pool, None, _NO_TRACING).Generate

    def _open_verify(self) -> SharedLink:
        verify, overheads = self._verify, self._setting.overheads
        call = VirtualCall(
            self._process,
            verify.process,
            verify.handler,
            link=Link(),
            overheads=overheads,
            later_ms=overheads.round_ms,
        )
        return SharedLink(call, verify_codec(verify.info.vocab_size))

    def _open_draft(self) -> SharedLink:
        draft, setting = self._draft, self._setting
        call = VirtualCall(
            self._process, draft.process, draft.handler, link=setting.link, overheads=setting.overheads
        )
        return SharedLink(call, draft_codec(self._verify.info.vocab_size, draft.info.name))

    async def generate(self, request: generation_pb2.GenerateRequest, client: Client) -> None:
        """One generation, to its end."""

        async def requests() -> AsyncIterator[generation_pb2.GenerateRequest]:
            yield request

        client.through = self._process, self._client_process
        await self._generate(requests(), client)


class Client:
    """Reads one generation: the context of `Generate`, without a network in between.

    Attributes:
        through: processes that each message costs time.
        completion: None while it runs.
    """

    def __init__(self) -> None:
        self.through: tuple[Process, ...] = ()
        self.completion: generation_pb2.Completion | None = None

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        """A chunk, or the completion."""
        now_s = asyncio.get_running_loop().time()
        for process in self.through:
            process.handle_message(now_s)
        if message.HasField("completion"):
            self.completion = message.completion

    def time_remaining(self) -> None:
        """No deadline."""

    def peer(self) -> str:
        """All are one client."""
        return "simulation"

    def invocation_metadata(self) -> tuple[()]:
        """None."""
        return ()


class World:
    """The services of a setting, on a virtual loop."""

    def __init__(self, setting: Setting) -> None:
        device = Device(setting.slowdown)
        self._services = verify, draft = VerifyService(setting, device), DraftService(setting, device)
        self.coordinator = Coordinator(setting, verify, draft)

    def check(self) -> None:
        """Raise what ended an engine, if anything did."""
        for service in self._services:
            if service.engine.task.done():
                service.engine.task.result()
