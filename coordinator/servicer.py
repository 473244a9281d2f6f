"""`specwire.v1.GenerationService`: messages in, messages out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from coordinator import metrics
from coordinator.admission import Admission, AdmissionSlot
from coordinator.credit import Credit
from coordinator.generation import Generation, Planner
from coordinator.length.draft_length import AdaptiveLength, FixedLength
from coordinator.length.measurements import SharedMeasurements
from coordinator.peers.drafter import RemoteDrafter
from coordinator.peers.handshake import DraftPool, VerifyPool
from coordinator.peers.replicas import Replica
from coordinator.peers.verifier import RemoteVerifier
from coordinator.prompts import Encoder, check_params, check_prompt, fitted
from coordinator.reader import CreditReader
from coordinator.resuming import Seam, find_seam
from coordinator.session import Session
from coordinator.totals import Totals, counted, watch
from specwire.completion import Completion
from specwire.config.services import CoordinatorConfig
from specwire.core import Rule, SamplingParams
from specwire.rpc import listening
from specwire.telemetry import tracing
from specwire.telemetry.metrics import Group
from specwire.tokenizer import Tokenizer
from specwire.v1 import generation_pb2, generation_pb2_grpc
from specwire.wire import client as client_wire
from specwire.wire import model as wire

_PAUSE_AFTER_S = 1.0
"""A generation that has waited for its client for so long leaves its place to others."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """What clients speak to."""

    def __init__(
        self,
        config: CoordinatorConfig,
        verify: VerifyPool,
        draft: DraftPool,
        tokenizer: Tokenizer | None,
        tracer: tracing.Tracing,
    ) -> None:
        self._config = config
        self._verify = verify
        self._draft = draft
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._tracer = tracer
        self._started_s = time.monotonic()
        self._admission = Admission(max_running=config.max_running, max_waiting=config.max_waiting)
        self._measured = SharedMeasurements(
            lambda: self._admission.num_running, num_outcomes=config.fixed_outcomes
        )
        self._num_finished = 0
        self.totals = Totals()

    def metrics(self) -> Group[metrics.CoordinatorSnapshot]:
        """What it counts, for Prometheus."""
        now = metrics.CoordinatorSnapshot(
            self.totals, self._admission, self._measured, self._verify, self._draft, self._config
        )
        return Group(metrics.TABLE, lambda: now)

    @counted
    async def Generate(  # noqa: N802
        self, requests: AsyncIterator[generation_pb2.GenerateRequest], context: Any
    ) -> None:
        # A stream without a request is one without a prompt.
        request = await anext(aiter(requests), generation_pb2.GenerateRequest())
        params = self._with_seed_and_rule(client_wire.generate_params(request))
        window = client_wire.opening_credit(request)
        client_wire.check_prompt_size(request, self._config.max_prompt_bytes)
        check_params(params, self._verify.info, self._tokenizer)
        check_prompt(request, params, self._verify.info, self._tokenizer)
        caller = listening.caller(context)
        caller.check(params)
        tenant = caller.name if self._config.tokens else ""
        params = dataclasses.replace(params, cache_salt=cache_salt(tenant, params.cache_salt))
        planner = self._planner(params)
        credit = Credit(window, planner.limit + 1)
        async with (
            CreditReader(context.write, credit, self._config.idle_timeout_s) as reader,
            self._admission.place(caller) as place,
            acknowledged(requests, reader),
        ):
            prompt = await self._encoder.token_ids(request, self._verify.info.context_len)
            params = fitted(params, len(prompt), self._verify.info, caller.max_tokens)
            seam = find_seam(
                list(request.generated_token_ids),
                request.context_digest,
                prompt=prompt,
                params=params,
                target=self._verify.info,
            )
            try:
                await self._generate(
                    prompt,
                    params,
                    planner,
                    reader,
                    place,
                    context,
                    seam=seam,
                    report_progress=request.report_progress,
                )
            finally:
                self._num_finished += 1

    async def _generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        planner: Planner,
        reader: CreditReader,
        place: AdmissionSlot,
        context: Any,
        *,
        seam: Seam,
        report_progress: bool,
    ) -> None:
        keyed = self._keyed(params)
        with self._peers(keyed, len(prompt), context.time_remaining) as (drafter, verifier):

            async def may_start() -> None:
                if not reader.is_ready:
                    await wait_for(reader, place, drafter, verifier)

            with self._tracer.span("generate", parent=_traceparent(context)) as span:
                span.set(_request_attributes(params, len(prompt), self._verify.info.name))
                generation = Generation(
                    prompt,
                    keyed,
                    drafter,
                    verifier,
                    planner=planner,
                    tracer=self._tracer,
                    parent=span.traceparent,
                    may_start=may_start,
                    generated_token_ids=seam.token_ids,
                )
                session = Session(
                    generation,
                    prompt,
                    params,
                    tokenizer=self._tokenizer,
                    target=self._verify.info,
                    credit=reader.credit,
                    generated_token_ids=seam.token_ids,
                    report_progress=report_progress,
                )
                watch(session, lambda: drafter.unavailable, span.traceparent)
                info: generation_pb2.ResumeInfo | None = client_wire.resume_info_to_proto(seam.info)
                async for chunk in session.chunks():
                    message = client_wire.chunk_to_proto(chunk)
                    reader.send(generation_pb2.GenerateResponse(chunk=message, resume_info=info))
                    info = None
                completion = session.completion(drafter.unavailable)
                span.set(_response_attributes(completion))
        done = client_wire.completion_to_proto(completion)
        reader.send(generation_pb2.GenerateResponse(completion=done))

    @contextlib.contextmanager
    def _peers(
        self, params: SamplingParams, prompt_len: int, remaining_s: Callable[[], float | None]
    ) -> Iterator[tuple[RemoteDrafter, RemoteVerifier]]:
        """Draft and verify for one sequence, whose streams end with the context."""
        drafter = RemoteDrafter(
            self._draft,
            params,
            prompt_len,
            vocab_limit=self._verify.info.vocab_size,
            timeout_s=self._config.draft_timeout_ms / 1e3,
            deadline_s=remaining_s(),
            tracer=self._tracer,
        )
        verifier = RemoteVerifier(
            self._verify,
            params,
            prompt_len,
            remaining_s=remaining_s,
            timeout_s=self._config.failover_timeout_s,
            tracer=self._tracer,
        )
        with contextlib.closing(verifier), contextlib.closing(drafter):
            yield drafter, verifier

    def _with_seed_and_rule(self, params: SamplingParams) -> SamplingParams:
        """What the request left to us. Whoever gives a seed wants the same text again, whatever the load."""
        rule = params.rule or self._config.fixed_rule
        if rule is None:
            matches = params.seed is not None or self._measured.draft_is_far
            rule = Rule.GUMBEL if matches else Rule.REJECTION
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return dataclasses.replace(params, seed=seed, rule=rule)

    def _fixed_length(self, params: SamplingParams) -> int | None:
        """Draft tokens a round; None where they are chosen in each round."""
        given = params.num_draft_tokens
        return self._config.fixed_draft_tokens if given is None else given

    def _keyed(self, params: SamplingParams) -> SamplingParams:
        """The same with the seed that random numbers are keyed by.

        Under rejection sampling a chosen length depends on what other requests have taught. Were one of them
        drawn with the same numbers, a seed given twice or a request taken up again, the choice would know how
        this one's rounds end. So nothing is drawn twice; the text does not repeat in any case.
        """
        if params.matches_tokens or self._fixed_length(params) is not None:
            return params
        return dataclasses.replace(params, seed=secrets.randbits(63))

    def _planner(self, params: SamplingParams) -> Planner:
        fixed = self._fixed_length(params)
        return AdaptiveLength(self._measured) if fixed is None else FixedLength(fixed, self._measured)

    async def GetModelInfo(  # noqa: N802
        self, request: generation_pb2.GetModelInfoRequest, context: Any
    ) -> generation_pb2.GetModelInfoResponse:
        draft = self._draft.info
        return generation_pb2.GetModelInfoResponse(
            target=wire.model_info_to_proto(self._verify.info),
            draft=wire.model_info_to_proto(draft) if draft else None,
            num_draft_tokens=self._config.fixed_draft_tokens,
        )

    async def GetStatus(  # noqa: N802
        self, request: generation_pb2.GetStatusRequest, context: Any
    ) -> generation_pb2.GetStatusResponse:
        return generation_pb2.GetStatusResponse(
            num_running=self._admission.num_running,
            num_waiting=self._admission.num_waiting,
            num_paused=self._admission.num_paused,
            num_finished=self._num_finished,
            draft_unavailable=self._draft.unavailable,
            uptime_ms=int((time.monotonic() - self._started_s) * 1e3),
            verify_replicas=map(_replica_status, self._verify.replicas),
            draft_replicas=map(_replica_status, self._draft.replicas),
        )


async def wait_for(
    reader: CreditReader, place: AdmissionSlot, *peers: RemoteDrafter | RemoteVerifier
) -> None:
    """Wait until a round may start. A longer wait is without the place, and without memory at the peers: they
    keep what they computed as known prefixes, as long as there is room for that.

    Raises:
        StreamIdleError: the client took nothing for too long.
        Exception: what else ends the generation.
    """
    try:
        async with asyncio.timeout(_PAUSE_AFTER_S):
            await reader.ready()
    except TimeoutError:
        for peer in peers:
            peer.close()
        async with place.left():
            await reader.ready()


@contextlib.asynccontextmanager
async def acknowledged(
    requests: AsyncIterator[generation_pb2.GenerateRequest], reader: CreditReader
) -> AsyncIterator[None]:
    """Take in acknowledgements while the body generates; one that cannot be used ends the generation."""

    async def take_in() -> None:
        try:
            async for request in requests:
                reader.acknowledge(client_wire.acknowledged_tokens(request))
        except Exception as error:
            reader.fail(error)

    taking_in = asyncio.create_task(take_in())
    try:
        yield
    finally:
        taking_in.cancel()


def cache_salt(tenant: str, given: str) -> str:
    """What keeps the cached prefixes of a request apart from those of others; empty to share them with all.

    Made of nothing but its arguments: a tenant's requests share them through all coordinators.

    Args:
        tenant: name of the bearer token; empty where none is asked for.
        given: by the client; a tenant's own requests may be apart, too.
    """
    if not tenant and not given:
        return ""
    return hashlib.blake2b(f"{tenant}\0{given}".encode(), digest_size=16).hexdigest()


def _replica_status(replica: Replica) -> generation_pb2.ReplicaStatus:
    return generation_pb2.ReplicaStatus(
        address=replica.address,
        unavailable=replica.unavailable or ("is not listed any more" if replica.is_leaving else ""),
        num_streams=replica.num_streams,
        num_other_streams=replica.num_others,
        num_lost=replica.num_lost,
    )


def _traceparent(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return wire.checked_traceparent(str(value))
    return ""


def _request_attributes(params: SamplingParams, num_prompt_tokens: int, model: str) -> dict[str, Any]:
    return {
        tracing.GEN_AI_OPERATION_NAME: "text_completion",
        tracing.GEN_AI_REQUEST_MODEL: model,
        tracing.GEN_AI_REQUEST_MAX_TOKENS: params.max_tokens,
        tracing.GEN_AI_REQUEST_TEMPERATURE: params.temperature,
        tracing.GEN_AI_REQUEST_TOP_K: params.top_k or None,
        tracing.GEN_AI_REQUEST_TOP_P: params.top_p,
        tracing.GEN_AI_REQUEST_SEED: params.seed,
        tracing.GEN_AI_USAGE_INPUT_TOKENS: num_prompt_tokens,
        tracing.RULE: params.rule,
    }


def _response_attributes(completion: Completion) -> dict[str, Any]:
    return {
        tracing.GEN_AI_RESPONSE_FINISH_REASONS: [completion.finish_reason.value],
        tracing.GEN_AI_USAGE_OUTPUT_TOKENS: completion.usage.completion_tokens,
        tracing.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: completion.timing.time_to_first_token_ms / 1e3,
        tracing.NUM_ROUNDS: completion.speculation.num_rounds,
        tracing.NUM_DRAFT_TOKENS: completion.speculation.num_draft_tokens,
        tracing.NUM_ACCEPTED_TOKENS: completion.speculation.num_accepted_tokens,
        tracing.NUM_PREPARED: completion.speculation.num_prepared,
        tracing.NUM_CACHED_TOKENS: completion.usage.cached_tokens,
        tracing.DRAFT_AVAILABLE: not completion.speculation.draft_unavailable,
    }
