"""Coordinators, verify and draft services put together in one simulated world."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.simulation.devices import (
    Device,
    GreedyDrafts,
    GreedyVerdicts,
    StepCost,
    VirtualEngine,
    VirtualRunner,
)
from benchmarks.simulation.network import Hosts, Link, Overheads, Process, VirtualCall
from coordinator.peers.addresses import Names
from coordinator.peers.codecs import draft_codec, verify_codec
from coordinator.peers.handshake import DraftPool, VerifyPool
from coordinator.peers.link import Call
from coordinator.peers.link import Link as SharedLink
from coordinator.peers.replicas import Replica
from coordinator.servicer import GenerationServicer
from draft_service.drafter import DraftDecider
from draft_service.servicer import DraftServicer
from specwire.config.services import CoordinatorConfig, DraftConfig
from specwire.core import MAX_NUM_OUTCOMES, ModelInfo
from specwire.engine.boot import ModelService
from specwire.engine.device import Decider, LogitsDecider
from specwire.engine.emulated import EmulatedModel
from specwire.security.tls import PLAINTEXT
from specwire.telemetry import tracing
from specwire.v1 import generation_pb2
from verify_service.servicer import VerifyServicer
from verify_service.verifier import VerifyDecider

_NO_TRACING = tracing.Tracing()
_UNLIMITED = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A world to be simulated.

    Attributes:
        model: the emulated draft; the target is the same with alpha 1.
        target, draft: costs of a pass of each.
        num_draft_tokens: a round; `auto` lets the coordinators choose.
        num_outcomes: to prepare for; `auto` lets them find out.
        max_depth: longest path of token trees, 0 for chains; `auto` lets them find out.
        speculative_config: drafts from text, as of the coordinator's flag.
        link: between coordinators and drafts; coordinators and their verify services are neighbours.
        num_groups: verify services, each with a coordinator of its own.
        num_drafts: draft services, among which the sequences of all groups are spread; 0 for none.
        colocated: drafts run on their group's target device, in the same process: one for each group, with
            no messages to pay for.
        exact: real sampling code; needed for any rule but greedy.
    """

    model: EmulatedModel
    target: StepCost
    draft: StepCost
    num_draft_tokens: str = "auto"
    num_outcomes: str = "auto"
    max_depth: str = "auto"
    speculative_config: str = ""
    link: Link = field(default_factory=Link)
    overheads: Overheads = field(default_factory=Overheads)
    num_groups: int = 1
    num_drafts: int = 1
    colocated: bool = False
    exact: bool = False


class _Service:
    """A model service in a process of its own."""

    def __init__(
        self,
        setting: Setting,
        hosts: Hosts,
        model: EmulatedModel,
        decider: Decider,
        cost: StepCost,
        device: Device,
    ) -> None:
        runner = VirtualRunner(model, cost, exact=setting.exact)
        self.device = device
        self.process = hosts.process()
        self._overheads = setting.overheads
        self.engine = VirtualEngine(runner, decider, device, self._host_s, model.context_len)
        self.info = ModelInfo(
            name=f"alpha={model.alpha:g}",
            vocab_size=model.vocab_size,
            context_len=model.context_len,
            prepares_outcomes=True,
            trees=True,
        )
        self.service = ModelService(self.engine, runner, self.info, _UNLIMITED)

    def _host_s(self, num_rows: int) -> float:
        """Seconds until the process has worked on so many rows."""
        work_ms = self._overheads.step_ms + num_rows * self._overheads.row_us / 1e3
        now_s = asyncio.get_running_loop().time()
        return self.process.work(now_s, work_ms / 1e3) - now_s


class VerifyService(_Service):
    """The real servicer and engine, on a simulated device."""

    def __init__(self, setting: Setting, hosts: Hosts) -> None:
        model = replace(setting.model, alpha=1.0, period=0)
        fast = LogitsDecider(GreedyVerdicts(model).consume)
        decider = VerifyDecider() if setting.exact else fast
        super().__init__(setting, hosts, model, decider, setting.target, Device())
        servicer = VerifyServicer(_NO_TRACING)
        servicer.service = self.service
        self.handler = servicer.Verify


class DraftService(_Service):
    """The real servicer, lookahead and engine, on a simulated device: its own, or a target's."""

    def __init__(self, setting: Setting, hosts: Hosts, device: Device) -> None:
        fast = LogitsDecider(GreedyDrafts(setting.model).consume)
        config = DraftConfig(max_outcomes=MAX_NUM_OUTCOMES)
        decider = DraftDecider(config) if setting.exact else fast
        super().__init__(setting, hosts, setting.model, decider, setting.draft, device)
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


class Group:
    """A verify service and its coordinator; `drafts` are what its streams take in turn."""

    def __init__(
        self, setting: Setting, hosts: Hosts, drafts: list[DraftService], tracer: tracing.Tracing
    ) -> None:
        self.verify = VerifyService(setting, hosts)
        if setting.colocated:
            drafts = [DraftService(setting, hosts, self.verify.device)]
            drafts[0].engine.share_device()
        self.coordinator = Coordinator(setting, hosts, self.verify, drafts, tracer)


class Coordinator:
    """The real servicer, without a server."""

    def __init__(
        self,
        setting: Setting,
        hosts: Hosts,
        verify: VerifyService,
        drafts: list[DraftService],
        tracer: tracing.Tracing,
    ) -> None:
        self._setting, self._verify = setting, verify
        self._process, self._client_process = hosts.process(), hosts.process()
        config = CoordinatorConfig(
            verify_address="127.0.0.1:1",
            draft_address="127.0.0.1:1" if drafts else "",
            num_draft_tokens=setting.num_draft_tokens,
            num_outcomes=setting.num_outcomes,
            max_depth=setting.max_depth,
            speculative_config=setting.speculative_config,
            max_running=_UNLIMITED,
        )
        target = verify.info
        verify_pool = VerifyPool("", Names())
        verify_pool.add(_Replica("verify", target, self._open_verify))
        verify_pool.check_info(target)
        draft_pool = DraftPool("", Names(), PLAINTEXT, target)
        for draft in drafts:
            draft_pool.add(_Replica("draft", draft.info, partial(self._open_draft, draft)))
        servicer = GenerationServicer(config, verify_pool, draft_pool, None, tracer)
        self._generate = servicer.Generate

    def _open_verify(self) -> SharedLink:
        overheads = self._setting.overheads
        call = VirtualCall(
            self._process,
            self._verify.process,
            self._verify.handler,
            link=Link(),
            overheads=overheads,
            later_ms=overheads.round_ms,
        )
        return SharedLink(call, verify_codec(self._verify.info.vocab_size))

    def _open_draft(self, draft: DraftService) -> SharedLink:
        return SharedLink(self._draft_call(draft), draft_codec(self._verify.info.vocab_size, draft.info.name))

    def _draft_call(self, draft: DraftService) -> Call:
        setting = self._setting
        if setting.colocated:
            free = Overheads()
            at_home = Hosts(free).process()
            return VirtualCall(at_home, at_home, draft.handler, link=Link(), overheads=free)
        return VirtualCall(
            self._process, draft.process, draft.handler, link=setting.link, overheads=setting.overheads
        )

    async def generate(self, request: generation_pb2.GenerateRequest, client: Client) -> None:
        """One generation, to its end."""

        async def requests() -> AsyncIterator[generation_pb2.GenerateRequest]:
            yield request

        client.through = self._process, self._client_process
        client.token_s = self._setting.overheads.token_us / 1e6
        await self._generate(requests(), client)


class Client:
    """Reads one generation: the context of `Generate`, without a network in between.

    Attributes:
        through: processes that each message costs time, and each of its tokens `token_s` more.
        arrivals: moment in seconds and number of tokens of each chunk.
        completion: None while it runs.
    """

    def __init__(self) -> None:
        self.through: tuple[Process, ...] = ()
        self.token_s = 0.0
        self.arrivals: list[tuple[float, int]] = []
        self.completion: generation_pb2.Completion | None = None

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        """A chunk, or the completion."""
        now_s = asyncio.get_running_loop().time()
        for process in self.through:
            process.handle_message(now_s)
            process.work(now_s, len(message.chunk.tokens) * self.token_s)
        if message.HasField("completion"):
            self.completion = message.completion
        elif message.chunk.tokens:
            self.arrivals.append((now_s, len(message.chunk.tokens)))

    def time_remaining(self) -> None:
        """No deadline."""

    def peer(self) -> str:
        """All are one client."""
        return "simulation"

    def invocation_metadata(self) -> tuple[()]:
        """None."""
        return ()


class World:
    """All groups and drafts of a setting, on a virtual loop; the coordinators' spans go to `tracer`."""

    def __init__(self, setting: Setting, tracer: tracing.Tracing = _NO_TRACING) -> None:
        self.drafts: list[DraftService] = []
        hosts = Hosts(setting.overheads)
        if not setting.colocated:
            self.drafts = [DraftService(setting, hosts, Device()) for _ in range(setting.num_drafts)]
        self.groups = [Group(setting, hosts, self.drafts, tracer) for _ in range(setting.num_groups)]

    def check(self) -> None:
        """Raise what ended an engine, if anything did."""
        for service in (*self.drafts, *(group.verify for group in self.groups)):
            if service.engine.task.done():
                service.engine.task.result()
