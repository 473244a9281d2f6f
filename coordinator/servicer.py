"""`specwire.v1.GenerationService`: messages in, messages out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from coordinator import spans
from coordinator.admission import Admission, AdmissionSlot
from coordinator.assembly import Assembly
from coordinator.beams.answer import BeamAnswer
from coordinator.beams.followers import Followers
from coordinator.beams.search import BeamGeneration
from coordinator.credit import Credit
from coordinator.generation import Drafter, Generation, Planner
from coordinator.ledger import Ledger
from coordinator.length.choice import Compared
from coordinator.peers.handshake import DraftPool, VerifyPool
from coordinator.peers.replicas import Replica
from coordinator.peers.verifier import RemoteVerifier
from coordinator.plain import DefaultRequests
from coordinator.reader import CreditReader, Writes
from coordinator.requests import GenerationRequest, RequestParser
from coordinator.scoring import scored_prompt
from coordinator.session import Session
from coordinator.totals import CallRecord, Totals
from specwire import clock
from specwire.completion import Completion, Stage
from specwire.config.security.bearer import Principal
from specwire.config.services import CoordinatorConfig
from specwire.errors import InvalidRequestError, SpecwireError
from specwire.rpc import listening
from specwire.rpc.wire import client as client_wire
from specwire.rpc.wire import model as wire
from specwire.rpc.wire.tokenizer_files import NO_FILES, TokenizerFiles
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.telemetry.propagation import REQUEST_ID
from specwire.telemetry.tracing import SpanKind
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2, generation_pb2_grpc

_MAX_ASKED, _MAX_STREAMS_ASKED = 64, 1 << 16
"""Numbers of streams that a status says the choice for, and how large each may be."""
_PAUSE_AFTER_S = 1.0
"""A generation that has waited so long for its client gives up its slot."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The coordinator's service, as its clients see it.

    Attributes:
        totals, admission: of this process.
        verify, draft: the model services.
        assembly: makes the parts of generations.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        verify: VerifyPool,
        draft: DraftPool,
        tokenizer: Tokenizer | None,
        tracer: tracing.Tracing,
        *,
        files: TokenizerFiles = NO_FILES,
    ) -> None:
        self.config: CoordinatorConfig = config
        self.verify: VerifyPool = verify
        self.draft: DraftPool = draft
        self._tokenizer = tokenizer
        self._files = files
        self._files_hash = files.hash
        self._tracer = tracer
        self._started_s = time.monotonic()
        self.admission: Admission = Admission(max_running=config.max_running, max_waiting=config.max_waiting)
        self.assembly: Assembly = Assembly(
            config, verify, draft, tokenizer, tracer, lambda: self.admission.num_running
        )
        self._parser = RequestParser(
            config,
            verify.info,
            tokenizer,
            self.assembly.drafts,
            lambda: self.assembly.is_draft_far,
            lambda: draft.info is not None and draft.info.learning is not None,
        )
        self._default_requests = DefaultRequests(config, self.assembly.drafts, self.assembly.choice)
        self._num_finished = 0
        self._writes = Writes()
        self.totals: Totals = Totals()

    async def Generate(  # noqa: N802
        self, requests: AsyncIterator[generation_pb2.GenerateRequest], context: Any
    ) -> None:
        call = await self._arrived(context)
        with self.totals.record(call):
            # A stream that ends without a request counts as one whose request has no prompt.
            first = await anext(aiter(requests), generation_pb2.GenerateRequest())
            checked = self._parser.check(first, listening.caller(context))
            call.span.set(spans.of_request(checked, self.verify.info.name))
            planner = self.assembly.planner(checked)
            credit = Credit(checked.credit_window, planner.limit + 1)
            pace = credit, self.config.idle_timeout_s, self._writes
            async with (
                CreditReader(context.write, *pace, has_each=first.report_progress) as reader,
                self._admitted(checked.caller, call) as slot,
                acknowledged(requests, reader),
            ):
                request = await self._parser.encode(checked)
                served = _Served(request, planner, reader, slot, call)
                try:
                    completion = await (self._search if request.beam_rules is not None else self._generate)(
                        served
                    )
                    message = client_wire.completion_to_proto(completion)
                    served.send(generation_pb2.GenerateResponse(completion=message))
                    call.ledger.switch(Stage.CLIENT_CREDIT)
                finally:
                    self._num_finished += 1
                    self._default_requests.log_once()

    def refused(self, method: str, error: SpecwireError) -> None:
        """Count a generation that was refused before it arrived here, as without a token."""
        if method == f"/{spans.METHOD}":
            with contextlib.suppress(SpecwireError), self.totals.record(CallRecord(self.totals, Ledger())):
                raise error

    async def _arrived(self, context: Any) -> CallRecord:
        """A call whose time begins now; its client gets its request id back."""
        ledger, metadata = Ledger(), listening.metadata(context)
        request_id = dict(metadata).get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = ""
        span = self._tracer.span(
            names.GENERATE,
            kind=SpanKind.SERVER,
            parent=self._tracer.propagators.read(metadata),
            attributes={**spans.CALL, names.REQUEST_ID: request_id or None},
            start_ns=clock.epoch_ns(ledger.arrived_ns),
        )
        if request_id:
            await context.send_initial_metadata((("x-request-id", request_id),))
        return CallRecord(self.totals, ledger, span, request_id, context.time_remaining)

    @contextlib.asynccontextmanager
    async def _admitted(self, caller: Principal, call: CallRecord) -> AsyncIterator[AdmissionSlot]:
        """Hold a slot while the body runs; the wait for it is a stage and a span."""
        call.ledger.switch(Stage.ADMISSION)
        async with contextlib.AsyncExitStack() as stack:
            with self._tracer.span("admission", parent=call.span.context):
                slot = await stack.enter_async_context(self.admission.slot(caller))
            call.ledger.switch(Stage.COORDINATOR)
            yield slot

    async def _generate(self, served: _Served) -> Completion:
        request, reader, call = served.request, served.reader, served.call
        await self._score_prompt(served)
        verifier = self.assembly.verifier(request, call, served.planner.limit)
        drafter = self.assembly.drafter(request, call, verifier)
        with contextlib.closing(verifier), contextlib.closing(drafter):
            generation = Generation(
                request=request,
                drafter=drafter,
                verifier=verifier,
                planner=served.planner,
                ledger=call.ledger,
                tracer=self._tracer,
                trace_detail=self.config.trace_detail,
                parent=call.span,
                turns=served.with_peers(drafter, verifier),
            )
            session = Session(
                request=request,
                drafter=drafter,
                tokenizer=self._tokenizer,
                credit=reader.credit,
                ledger=call.ledger,
                totals=self.totals.tally,
            )
            await session.replay()
            call.begin(session)

            def take() -> generation_pb2.GenerateResponse:
                response = session.take()
                call.count(len(response.chunk.tokens))
                return response

            if not session.ended:  # as one may be that is resumed
                async with contextlib.aclosing(generation.rounds()) as rounds:
                    async for done in rounds:
                        session.add(done)
                        reader.send(take)
                        if session.ended:
                            break
            return session.completion()

    async def _score_prompt(self, served: _Served) -> None:
        """Report the prompt's log probabilities, if they are asked for; a stream that is resumed has them."""
        request, call = served.request, served.call
        if request.params.prompt_logprobs is None or request.generated_token_ids:
            return
        with contextlib.closing(self.assembly.scorer(request, call)) as verifier:
            turns = served.with_peers(verifier)
            scores = scored_prompt(request, verifier, self._tokenizer, call.ledger, call.span, turns)
            async with contextlib.aclosing(scores):
                async for message in scores:
                    served.send(message)

    async def _search(self, served: _Served) -> Completion:
        """A beam search, which the client hears of at its end."""
        request, reader, call = served.request, served.reader, served.call
        assert request.beam_rules is not None
        num_beams = request.beam_rules.num_beams
        planner, drafts, targets = self.assembly.beams(request, call, num_beams, served.planner.limit)
        with contextlib.closing(targets), contextlib.closing(drafts):
            search = BeamGeneration(
                request=request,
                drafts=drafts,
                targets=targets,
                planner=planner,
                ledger=call.ledger,
                tracer=self._tracer,
                parent=call.span,
                turns=served.with_peers(drafts, targets),
            )
            answer = BeamAnswer(
                request=request,
                drafts=drafts,
                tokenizer=self._tokenizer,
                ledger=call.ledger,
                totals=self.totals.tally,
            )
            call.begin(answer)
            async with contextlib.aclosing(search.rounds()) as rounds:
                async for done in rounds:
                    answer.add(done)
            first = await answer.finish(search.finished)
            completion = answer.completion()
        num_sent = len(first.chunk.tokens)
        reader.credit.spend(num_emitted=num_sent, num_sent=num_sent)
        call.count(completion.usage.completion_tokens)  # of all texts: the others are in the last message
        served.send(first)
        return completion

    async def GetModelInfo(  # noqa: N802
        self, request: generation_pb2.GetModelInfoRequest, context: Any
    ) -> generation_pb2.GetModelInfoResponse:
        draft = self.draft.info
        target = replace(  # with what clients of a conversation need to know
            self.verify.info,
            chat_template=self._tokenizer.tool_template if self._tokenizer else "",
            tokenizer_hash=self._files_hash,
            tokenizer_bytes=len(self._files.data),
        )
        return generation_pb2.GetModelInfoResponse(
            target=wire.model_info_to_proto(target),
            draft=wire.model_info_to_proto(draft) if draft else None,
            num_draft_tokens=self.config.fixed_draft_tokens,
        )

    async def GetTokenizer(  # noqa: N802
        self, request: generation_pb2.GetTokenizerRequest, context: Any
    ) -> generation_pb2.GetTokenizerResponse:
        return generation_pb2.GetTokenizerResponse(page=self._files.page(request.offset))

    async def GetStatus(  # noqa: N802
        self, request: generation_pb2.GetStatusRequest, context: Any
    ) -> generation_pb2.GetStatusResponse:
        asked = request.if_num_streams
        if len(asked) > _MAX_ASKED or not all(0 < num <= _MAX_STREAMS_ASKED for num in asked):
            problem = f"must be at most {_MAX_ASKED} numbers in [1, {_MAX_STREAMS_ASKED}]"
            raise InvalidRequestError("if_num_streams", [*asked], problem)
        return generation_pb2.GetStatusResponse(
            num_running=self.admission.num_running,
            num_waiting=self.admission.num_waiting,
            num_paused=self.admission.num_paused,
            num_finished=self._num_finished,
            draft_unavailable=self.draft.unavailable,
            why_plain=self._default_requests.why_plain(self.draft.unavailable),
            uptime_ms=int((time.monotonic() - self._started_s) * 1e3),
            verify_replicas=map(_replica_status, self.verify.replicas),
            draft_replicas=map(_replica_status, self.draft.replicas),
            by_source=[
                generation_pb2.SourceTotals(**asdict(each))
                for each in self.totals.tally.speculation().by_source
            ],
            ways=map(_way_status, self.assembly.choice.compared()),
            num_workers=self.config.workers,
            choices=[
                generation_pb2.ChoiceStatus(
                    num_streams=num, ways=map(_way_status, self.assembly.choice.at(num).expected())
                )
                for num in asked
            ],
        )


@dataclass(slots=True)
class _Served:
    """A request that has its slot, and its client. Says when its rounds may start, as a `generation.Turns`.

    Attributes:
        peers: whose sequences are closed during a long wait.
    """

    request: GenerationRequest
    planner: Planner
    reader: CreditReader
    slot: AdmissionSlot
    call: CallRecord
    peers: tuple[Drafter | RemoteVerifier | Followers[Any], ...] = ()

    def with_peers(self, *peers: Drafter | RemoteVerifier | Followers[Any]) -> _Served:
        """This one, with these peers."""
        self.peers = peers
        return self

    def send(self, message: generation_pb2.GenerateResponse) -> None:
        """Write a message that is ready, after those before it."""
        self.reader.send(lambda: message)

    @property
    def may_start(self) -> bool:
        return self.reader.is_ready

    async def wait(self) -> None:
        """A long wait is without the slot, and without sequences at the peers: their caches keep what was
        computed as known prefixes, as long as there is room. Errors as for `CreditReader.ready`.
        """
        ledger = self.call.ledger
        ledger.switch(Stage.CLIENT_CREDIT)
        try:
            async with asyncio.timeout(_PAUSE_AFTER_S):
                await self.reader.ready()
        except TimeoutError:
            for peer in self.peers:
                peer.close()
            async with self.slot.released():
                await self.reader.ready()
                ledger.switch(Stage.ADMISSION)
        ledger.switch(Stage.COORDINATOR)


@contextlib.asynccontextmanager
async def acknowledged(
    requests: AsyncIterator[generation_pb2.GenerateRequest], reader: CreditReader
) -> AsyncIterator[None]:
    """Receive acknowledgements while the body generates; an invalid one ends the generation."""

    async def receive() -> None:
        try:
            async for request in requests:
                reader.acknowledge(client_wire.acknowledged_tokens(request))
        except Exception as error:
            reader.fail(error)

    receiving = asyncio.create_task(receive())
    try:
        yield
    finally:
        receiving.cancel()


def _replica_status(replica: Replica) -> generation_pb2.ReplicaStatus:
    return generation_pb2.ReplicaStatus(
        address=replica.address,
        unavailable=replica.unavailable or ("is not listed any more" if replica.is_leaving else ""),
        num_streams=replica.num_streams,
        num_other_streams=replica.num_other_streams,
        num_lost=replica.num_lost,
    )


def _way_status(compared: Compared) -> generation_pb2.WayStatus:
    way, is_chosen, expected_rate, measured_rate = compared
    return generation_pb2.WayStatus(
        name=str(way),
        is_chosen=is_chosen,
        expected_tokens_per_s=expected_rate,
        measured_tokens_per_s=measured_rate,
    )
