"""Where the time went when a target was lost: stages still add up, and the trace names what was lost.

A draft that is lost: `test_ledger`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from specwire import Client, Rule, SamplingParams
from specwire.cli.process import Service
from specwire.completion import Stage, Timing
from specwire.telemetry.semantics import stage_attribute
from tests.support.fixtures import entered
from tests.support.fleet import Fleet, hung_device, stopped
from tests.support.otlp_receiver import OtlpReceiver
from tools.timeline.spans import RecordedSpan

pytestmark = pytest.mark.timeout(300)

PROMPT = [3, 1, 4]
NUM_TOKENS = 40
receiver = entered(OtlpReceiver)


@pytest.fixture(scope="module")
def fleet(receiver: OtlpReceiver) -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        fleet = Fleet(draft_timeout_ms=1000, failover_timeout_s=60)
    try:
        yield fleet
    finally:
        fleet.close()


Fault = Callable[[Service], AbstractContextManager[None]]


def disturbed(fleet: Fleet, fault: Fault, seed: int) -> Timing:
    """A generation in whose middle the verify service that has its stream gets the fault."""
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, rule=Rule.GUMBEL)
    with Client(fleet.address) as client, contextlib.ExitStack() as faults:
        with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
            next(iter(stream))
            busy = {each.address for each in client.get_status().verify_replicas if each.num_streams}
            for service in fleet.verifies:
                if service.address in busy:
                    faults.enter_context(fault(service))
            for _ in stream:
                pass
        assert len(stream.completion.token_ids) == NUM_TOKENS
        return stream.completion.timing


def spans_of(receiver: OtlpReceiver, seed: int) -> list[RecordedSpan]:
    """The trace of the generation with this seed, whose stages add up to its span."""

    def root(spans: list[RecordedSpan]) -> RecordedSpan | None:
        found = [span for span in spans if span.name == "generate"]
        return next((span for span in found if span.attributes.get("gen_ai.request.seed") == seed), None)

    spans = receiver.wait_for(lambda spans: root(spans) is not None)
    generate = root(spans)
    assert generate is not None
    total_ms = sum(float(str(generate.attributes.get(stage_attribute(stage), 0.0))) for stage in Stage)
    assert total_ms == pytest.approx(generate.duration_ns / 1e6, abs=1.0)
    return [span for span in spans if span.trace_id == generate.trace_id]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [stopped, lambda service: hung_device(service, "verify")], ids=["stop", "hung"]
)
def test_a_verify_that_freezes_and_another_takes_over(
    fleet: Fleet, receiver: OtlpReceiver, fault: Fault
) -> None:
    seed = 2 + (fault is stopped)
    timing = disturbed(fleet, fault, seed)
    assert sum(timing.stages.values()) == pytest.approx(timing.total_ms, abs=1e-3)
    assert max(timing.stages, key=timing.of) is Stage.FAILOVER, timing
    assert any(span.name == "verify" and span.is_error for span in spans_of(receiver, seed))
