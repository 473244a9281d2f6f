"""What draft and verify service say about the requests of a sequence: timings in the answer, and spans."""

from __future__ import annotations

from dataclasses import dataclass

from specwire import clock
from specwire.core import Timings
from specwire.engine.jobs import Job
from specwire.telemetry import semantics as names
from specwire.telemetry.propagation import TraceContext
from specwire.telemetry.tracing import Span, SpanKind, Tracing


def timings(job: Job, received_ns: int, ahead_ns: int = 0) -> Timings:
    """Of a finished job whose answer is sent now.

    Args:
        received_ns: when its request arrived, by the stopwatch; the job may have begun before.
        ahead_ns: its passes that had ended by then.
    """
    began_ns = max(job.started_ns, received_ns)
    worked_ns = max(0, job.finished_ns - began_ns)
    forward_ns = min(job.forward_ns - ahead_ns, worked_ns)  # of a pass under way only what was left of it
    return Timings(
        queue_ns=max(0, job.started_ns - max(job.arrived_ns, received_ns)),
        forward_ns=forward_ns,
        residence_ns=clock.stopwatch_ns() - received_ns,
        stall_ns=worked_ns - forward_ns,
        ahead_ns=job.forward_ns - forward_ns,
    )


_NOT_RECORDED = Span()


@dataclass(frozen=True, slots=True)
class SequenceSpans:
    """Makes the spans of one sequence's requests.

    Attributes:
        role: "draft" or "verify".
        method: full name of the gRPC method.
        context: the trace that the sequence belongs to.
        is_detailed: whether a request has spans of its queue and its passes.
    """

    tracer: Tracing
    role: str
    method: str
    context: TraceContext
    is_detailed: bool

    def serving(self, traceparent: str) -> Span:
        """A span around a request, whose sender's span is `traceparent`; not recorded where that is empty."""
        if not traceparent:
            return _NOT_RECORDED
        return self.tracer.span(
            f"{self.role}.serve",
            kind=SpanKind.SERVER,
            parent=self.context._replace(traceparent=traceparent),
            attributes={names.RPC_SYSTEM_NAME: names.GRPC, names.RPC_METHOD: self.method},
        )

    def finish(self, span: Span, job: Job, spent: Timings) -> None:
        """End a request's span, which says what the job was and where the time went, before its answer is
        sent: with it, the caller may close the sequence."""
        if not span.trace_id:
            return
        handling_ns = spent.residence_ns - spent.queue_ns - spent.stall_ns - spent.forward_ns
        span.set(
            {
                names.BASE_LEN: job.committed_len,
                names.BATCH_SIZE: job.batch_size,
                names.NUM_CACHED_TOKENS: job.num_cached_tokens,
                names.QUEUE_MS: (spent.queue_ns + spent.stall_ns) / 1e6,
                names.FORWARD_MS: spent.forward_ns / 1e6,
                names.HANDLING_MS: handling_ns / 1e6,
                names.AHEAD_MS: spent.ahead_ns / 1e6,
            }
        )
        if self.is_detailed:
            parts = (("queue", job.arrived_ns, job.started_ns), ("forward", job.started_ns, job.finished_ns))
            for part, start_ns, end_ns in parts:
                finer = self.tracer.span(
                    f"{self.role}.{part}", parent=span.context, start_ns=clock.epoch_ns(start_ns)
                )
                finer.end(clock.epoch_ns(end_ns))
        span.end()

    def finish_at_once(self, span: Span, base_len: int) -> None:
        """End the span of a request whose answer was on its way when it arrived: no work is part of it."""
        if span.trace_id:
            spent = dict.fromkeys((names.QUEUE_MS, names.FORWARD_MS, names.HANDLING_MS), 0.0)
            span.set({names.BASE_LEN: base_len, **spent})
            span.end()
