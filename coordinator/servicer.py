"""`specwire.v1.GenerationService`: messages in, messages out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from coordinator import metrics
from coordinator.admission import Admission
from coordinator.credit import Credit
from coordinator.draft_length import AdaptiveLength, FixedLength
from coordinator.drafting import RemoteDrafter
from coordinator.generation import Generation, Planner
from coordinator.measurements import SharedMeasurements
from coordinator.peers import DraftPool, VerifyPool
from coordinator.replicas import Replica
from coordinator.resuming import Seam, find_seam
from coordinator.session import Session
from coordinator.totals import Totals, counted, watch
from coordinator.verifying import RemoteVerifier
from specwire import client_wire, doors, tracing, wire
from specwire.completion import Chunk, Completion
from specwire.config import CoordinatorConfig
from specwire.core import ModelInfo, Rule, SamplingParams
from specwire.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from specwire.metrics import Group
from specwire.tokenizer import Tokenizer
from specwire.v1 import generation_pb2, generation_pb2_grpc


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
        self._tracer = tracer
        self._started_s = time.monotonic()
        self._admission = Admission(max_running=config.max_running, max_waiting=config.max_waiting)
        self._measured = SharedMeasurements(
            lambda: self._admission.num_running, num_outcomes=config.fixed_outcomes
        )
        self._num_finished = 0
        self.totals = Totals()

    def metrics(self) -> Group[metrics.Snapshot]:
        """What it counts, for Prometheus."""
        now = metrics.Snapshot(
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
        prompt = prompt_token_ids(request, self._tokenizer)
        check_fit(prompt, params, self._verify.info, self._tokenizer)
        caller = doors.caller(context)
        caller.check(params)
        seam = find_seam(
            list(request.generated_token_ids),
            request.context_digest,
            prompt=prompt,
            params=params,
            target=self._verify.info,
        )
        planner = self._planner(params)
        async with self._admission.place(caller):
            try:
                async with acknowledged(requests, Credit(window, planner.limit + 1)) as credit:
                    await self._generate(
                        prompt,
                        params,
                        planner,
                        credit,
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
        credit: Credit,
        context: Any,
        *,
        seam: Seam,
        report_progress: bool,
    ) -> None:
        with self._peers(params, len(prompt), context.time_remaining) as (drafter, verifier):
            with self._tracer.span("generate", parent=_traceparent(context)) as span:
                span.set(_request_attributes(params, len(prompt), self._verify.info.name))
                generation = Generation(
                    prompt,
                    params,
                    drafter,
                    verifier,
                    planner=planner,
                    tracer=self._tracer,
                    parent=span.traceparent,
                    may_start=credit.room,
                    generated_token_ids=seam.token_ids,
                )
                session = Session(
                    generation,
                    prompt,
                    params,
                    tokenizer=self._tokenizer,
                    target=self._verify.info,
                    credit=credit,
                    generated_token_ids=seam.token_ids,
                    report_progress=report_progress,
                )
                watch(session, lambda: drafter.unavailable, span.traceparent)
                await write_chunks(session.chunks(), client_wire.resume_info_to_proto(seam.info), context)
                completion = session.completion(drafter.unavailable)
                span.set(_response_attributes(completion))
            done = generation_pb2.GenerateResponse(completion=client_wire.completion_to_proto(completion))
            await context.write(done)

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

    def _planner(self, params: SamplingParams) -> Planner:
        fixed = params.num_draft_tokens
        if fixed is None:
            fixed = self._config.fixed_draft_tokens
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
            num_finished=self._num_finished,
            draft_unavailable=self._draft.unavailable,
            uptime_ms=int((time.monotonic() - self._started_s) * 1e3),
            verify_replicas=map(_replica_status, self._verify.replicas),
            draft_replicas=map(_replica_status, self._draft.replicas),
        )


async def write_chunks(chunks: AsyncIterator[Chunk], info: generation_pb2.ResumeInfo, context: Any) -> None:
    """Write each chunk while the next round begins; what ends the rounds is heard after all they brought.

    Args:
        info: goes with the first one.
    """
    writing: Awaitable[None] | None = None
    try:
        async for chunk in chunks:
            message = generation_pb2.GenerateResponse(
                chunk=client_wire.chunk_to_proto(chunk), resume_info=info if writing is None else None
            )
            if writing is not None:
                await writing
            writing = asyncio.ensure_future(_write_later(context, message))
    except BaseException:
        if writing is not None:
            await asyncio.gather(writing, return_exceptions=True)
        raise
    if writing is not None:
        await writing


async def _write_later(context: Any, message: generation_pb2.GenerateResponse) -> None:
    """After what else is ready now: a device waits for the next round's request."""
    await asyncio.sleep(0)
    await context.write(message)


@contextlib.asynccontextmanager
async def acknowledged(
    requests: AsyncIterator[generation_pb2.GenerateRequest], credit: Credit
) -> AsyncIterator[Credit]:
    """Take in acknowledgements while the body generates; one that cannot be used ends the generation."""

    async def take_in() -> None:
        try:
            async for request in requests:
                credit.acknowledge(client_wire.acknowledged_tokens(request))
        except Exception as error:
            credit.fail(error)

    taking_in = asyncio.create_task(take_in())
    try:
        yield credit
    finally:
        taking_in.cancel()


def prompt_token_ids(request: generation_pb2.GenerateRequest, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt as token ids, whichever of its three forms came.

    Raises:
        InvalidRequestError: no prompt, or an empty one.
        UnsupportedError: text for a target without a tokenizer, or messages without a chat template.
    """
    form = request.WhichOneof("prompt")
    if form == "token_ids":
        token_ids = list(request.token_ids.ids)
    elif form is None:
        raise InvalidRequestError("prompt", "unset", "a prompt is required")
    elif tokenizer is None:
        raise UnsupportedError("prompt", form, "the target has no tokenizer; give prompt_token_ids")
    elif form == "text":
        token_ids = tokenizer.encode(request.text)
    else:
        messages = [{"role": m.role, "content": m.content} for m in request.messages.messages]
        token_ids = tokenizer.apply_chat_template(messages)
    if not token_ids:
        raise InvalidRequestError("prompt", "empty", "at least one token is required")
    return token_ids


def check_fit(
    prompt: list[int], params: SamplingParams, target: ModelInfo, tokenizer: Tokenizer | None
) -> None:
    """Refuse what the target cannot do, before anything runs.

    Raises:
        InvalidRequestError: a token id outside the vocabulary.
        ContextLengthError: prompt and max_tokens do not fit.
        UnsupportedError: stop strings without a tokenizer.
    """
    length = len(prompt) + params.max_tokens
    if length > target.context_len:
        raise ContextLengthError(
            "max_tokens",
            params.max_tokens,
            f"with a prompt of {len(prompt)} tokens is over the context of {target.context_len}",
        )
    named = [(f"prompt_token_ids[{i}]", token_id) for i, token_id in enumerate(prompt)]
    named += [(f"stop_token_ids[{i}]", token_id) for i, token_id in enumerate(params.stop_token_ids)]
    named += [(f"logit_bias[{token_id}]", token_id) for token_id in params.logit_bias]
    for name, token_id in named:
        if not 0 <= token_id < target.vocab_size:
            raise InvalidRequestError(name, token_id, f"is outside the vocabulary of {target.vocab_size}")
    if params.stop and tokenizer is None:
        raise UnsupportedError("stop", list(params.stop), "the target has no tokenizer; use stop_token_ids")


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
