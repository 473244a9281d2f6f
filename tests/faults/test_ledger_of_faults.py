"""Where the time went when a service was lost: stages still add up, and the trace names what was lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from specwire import Client, Rule, SamplingParams
from specwire.cli.process import Service
from specwire.completion import Stage, Timing
from specwire.telemetry.semantics import stage_attribute
from tests.support.fleet import Fleet, hung_device, stopped
from tests.support.otlp_receiver import OtlpReceiver
from tools.timeline.spans import RecordedSpan

pytestmark = pytest.mark.timeout(300)

PROMPT = [3, 1, 4]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


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


@contextlib.contextmanager
def killed(service: Service) -> Iterator[None]:
    service.kill()
    yield


Fault = Callable[[Service], AbstractContextManager[None]]


def disturbed(fleet: Fleet, role: str, fault: Fault, seed: int) -> Timing:
    """A generation in whose middle the services of a role that have its streams get the fault."""
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, rule=Rule.GUMBEL)
    with Client(fleet.address) as client, contextlib.ExitStack() as faults:
        with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
            next(iter(stream))
            busy = {
                each.address
                for each in [*client.get_status().draft_replicas, *client.get_status().verify_replicas]
                if each.num_streams
            }
            for service in fleet.group(role):
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


def check(timing: Timing) -> None:
    assert sum(timing.stages.values()) == pytest.approx(timing.total_ms, abs=1e-3)


def lost(spans: list[RecordedSpan], name: str) -> list[RecordedSpan]:
    return [span for span in spans if span.name == name and span.is_error]


@pytest.mark.slow
def test_a_draft_that_hangs(fleet: Fleet, receiver: OtlpReceiver) -> None:
    timing = disturbed(fleet, "draft", lambda service: hung_device(service, "draft"), seed=1)
    check(timing)
    assert max(timing.stages, key=timing.of) in (Stage.DRAFT, Stage.FAILOVER), timing
    assert timing.of(Stage.DRAFT, Stage.FAILOVER) > 900
    spans_of(receiver, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [stopped, lambda service: hung_device(service, "verify")], ids=["stop", "hung"]
)
def test_a_verify_that_freezes_and_another_takes_over(
    fleet: Fleet, receiver: OtlpReceiver, fault: Fault
) -> None:
    seed = 2 + (fault is stopped)
    timing = disturbed(fleet, "verify", fault, seed)
    check(timing)
    assert max(timing.stages, key=timing.of) is Stage.FAILOVER, timing
    assert lost(spans_of(receiver, seed), "verify")


@pytest.mark.slow
def test_a_draft_that_is_killed(fleet: Fleet, receiver: OtlpReceiver) -> None:
    """It costs next to nothing; the trace says what happened."""
    timing = disturbed(fleet, "draft", killed, seed=4)
    check(timing)
    assert timing.of(Stage.FAILOVER) < timing.verify_ms
    events = [event.name for span in spans_of(receiver, 4) for event in span.events]
    assert "draft lost" in events, "in a call, whose span has failed then, or between two"
