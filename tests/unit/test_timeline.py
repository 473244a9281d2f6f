"""Timelines: spans read, laid out and chosen, by traces made by hand."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from specwire.completion import Stage
from specwire.errors import ConfigError
from specwire.telemetry import semantics as names
from tests.support.traces import MS, TRACE, Trace, laid_out, saved, three_rounds
from tools.timeline import picture
from tools.timeline.generation import choose, is_complete
from tools.timeline.intervals import gaps, intersection, union
from tools.timeline.layout import Bar, BarKind, Lane, Mark, Timeline
from tools.timeline.spans import SpanEvent, read

OTLP_SPAN: dict[str, Any] = {
    "traceId": TRACE.upper(),
    "spanId": "0000000000000001",
    "name": "generate",
    "startTimeUnixNano": "1000",
    "endTimeUnixNano": 3000,
    "attributes": [
        {"key": "s", "value": {"stringValue": "x"}},
        {"key": "b", "value": {"boolValue": True}},
        {"key": "i", "value": {"intValue": "-9007199254740993"}},
        {"key": "d", "value": {"doubleValue": 0.5}},
        {"key": "n", "value": {"doubleValue": "Infinity"}},
        {"key": "a", "value": {"arrayValue": {"values": [{"intValue": 1}, {"stringValue": "y"}]}}},
        {"key": "m", "value": {"kvlistValue": {"values": [{"key": "k", "value": {"intValue": "2"}}]}}},
        {"key": "0", "value": {}},
    ],
    "status": {"code": 2},
    "kind": 3,
    "links": [{"traceId": TRACE.upper(), "spanId": "00000000000000AA"}],
    "events": [
        {"name": "lost", "timeUnixNano": "2000", "attributes": [{"key": "k", "value": {"intValue": 1}}]}
    ],
}


def otlp(**changes: Any) -> dict[str, Any]:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "specwire-draft"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [OTLP_SPAN | changes]}]}]}


class TestReading:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "spans.json"

    @pytest.mark.parametrize(
        "text",
        [
            json.dumps(otlp()) + "\n\n" + json.dumps(otlp()) + "\n",
            json.dumps([otlp(), otlp()]),
            json.dumps([otlp(), otlp()], indent=2),
            json.dumps({"resourceSpans": otlp()["resourceSpans"] * 2}, indent=1),
        ],
        ids=["lines", "array", "indented array", "indented object"],
    )
    def test_all_forms(self, text: str, path: Path) -> None:
        path.write_text(text)
        first, second = read(path)
        assert first == second
        assert (first.trace_id, first.parent_id, first.service_name) == (TRACE, "", "specwire-draft")
        assert (first.start_ns, first.end_ns, first.is_error) == (1000, 3000, True)
        assert first.attributes == {
            "s": "x",
            "b": True,
            "i": -9007199254740993,
            "d": 0.5,
            "n": float("inf"),
            "a": [1, "y"],
            "m": {"k": 2},
            "0": None,
        }
        assert first.links == ((TRACE, "00000000000000aa"),)
        assert first.events == (SpanEvent("lost", 2000, {"k": 1}),)

    def test_jaegers_download(self, path: Path) -> None:
        fields = [{"key": "event", "value": "draft lost"}, {"key": "k", "value": 1}]
        span = {
            "traceID": TRACE,
            "spanID": "0000000000000002",
            "operationName": "round",
            "references": [
                {"refType": "FOLLOWS_FROM", "traceID": TRACE, "spanID": "0000000000000007"},
                {"refType": "CHILD_OF", "traceID": TRACE, "spanID": "0000000000000001"},
            ],
            "logs": [{"timestamp": 6, "fields": fields}],
            "startTime": 5,
            "duration": 2,
            "tags": [
                {"key": "specwire.round", "type": "int64", "value": 3},
                {"key": "span.kind", "type": "string", "value": "client"},
            ],
            "processID": "p1",
        }
        trace = {"traceID": TRACE, "spans": [span], "processes": {"p1": {"serviceName": "c", "tags": []}}}
        path.write_text(json.dumps({"data": [trace]}, indent=2))
        [found] = read(path)
        assert (found.name, found.parent_id, found.service_name) == ("round", "0000000000000001", "c")
        assert (found.start_ns, found.end_ns, found.attributes["specwire.round"]) == (5000, 7000, 3)
        assert found.links == ((TRACE, "0000000000000007"),)
        assert found.events == (SpanEvent("draft lost", 6000, {"k": 1}),)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", ": is empty"),
            ("hello", ", line 1: is not JSON (Expecting value)"),
            ("{}\n{}\n{,}\n", ", line 3: is not JSON"),
            ('[\n{"resourceSpans": []},\n,]', ", line 3: is not JSON"),
            ("[" * 100_000, ", line 1: is not JSON"),
            ("5", ", line 1: is neither OTLP's traces nor a download from Jaeger"),
            ('{"resourceLogs": []}', "nor a download from Jaeger (no 'resourceSpans')"),
            (otlp(spanId="ab" * 7), f"('{'ab' * 7}' is not 8 bytes in hex)"),
            (otlp(startTimeUnixNano="soon"), "invalid literal for int() with base 10: 'soon'"),
            (otlp(startTimeUnixNano=-1), "span 0000000000000001 ends before it starts, or has no times"),
            (otlp(endTimeUnixNano="7"), "span 0000000000000001 ends before it starts"),
            (otlp(links=[{"traceId": TRACE}]), "(no 'spanId')"),
            (otlp(events=[{"timeUnixNano": "noon"}]), "invalid literal for int() with base 10: 'noon'"),
            (otlp(attributes=[{"value": {}}]), "(no 'key')"),
            (otlp(attributes=[{"key": "k", "value": {"a": 1, "b": 2}}]), "line 1: is neither"),
            ({"data": [{"spans": [{"processID": "p"}], "processes": {}}]}, "(no 'p')"),
        ],
    )
    def test_what_is_malformed_is_named(self, text: str | dict[str, Any], problem: str, path: Path) -> None:
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
            read(path)
        assert str(caught.value).startswith(str(path))

    def test_no_such_file(self, path: Path) -> None:
        with pytest.raises(ConfigError, match=r"spans\.json: cannot be read"):
            read(path)

    def test_what_tests_write_is_read_back(self, path: Path) -> None:
        spans = three_rounds()
        assert read(saved(path, spans)) == spans


def bars_of(timeline: Timeline, *kinds: BarKind) -> list[Bar]:
    return [bar for bar in timeline.bars if bar.kind in kinds]


def interval_ms(bar: Bar) -> tuple[float, float]:
    return bar.start_ns / MS, bar.end_ns / MS


def test_intervals_by_hand() -> None:
    left, right = union([(0, 4), (2, 6), (9, 9), (8, 10)]), [(1, 3), (5, 9)]
    assert left == [(0, 6), (8, 10)]
    assert intersection(left, right) == [(1, 3), (5, 6), (8, 9)]
    assert gaps((0, 10), right) == [(0, 1), (3, 5), (9, 10)]
    assert gaps((2, 6), [(5, 9), (0, 3)]) == [(3, 5)]
    assert gaps((2, 3), right) == []
    assert gaps((3, 4), right) == gaps((3, 4), []) == [(3, 4)]


class TestLayout:
    def test_rounds_lanes_and_overlaps(self) -> None:
        """Prepared work names the round that links to it; what was exported twice is there once."""
        timeline = laid_out(three_rounds() * 2)
        assert [one.mark for one in timeline.rounds] == [Mark.MISS, Mark.HIT, Mark.PLAIN]
        labels = [one.labels[0] for one in timeline.rounds]
        assert labels == ["0: miss ✗ 2/4", "1: hit ✓ 4/4", "2: plain – 0/0"]
        prepared = bars_of(timeline, BarKind.DRAFT_PREPARE)
        assert [bar.label for bar in prepared] == ["→ 1", ""]
        assert prepared[1].title == "draft.prepare, not used"
        assert timeline.overlaps == [(22 * MS, 40 * MS), (52 * MS, 62 * MS)]
        assert timeline.overlap_share == pytest.approx(0.28)
        found = [
            (bar.kind.lane, bar.row, bar.title, *interval_ms(bar))
            for bar in timeline.bars
            if bar.start_ns < 50 * MS
        ]
        assert sorted(found) == sorted(
            [
                (Lane.COORDINATOR, 0, "round", 0, 50),
                (Lane.COORDINATOR, 1, "accept", 48, 49),
                (Lane.DRAFT, 0, "draft.queue", 4, 5),
                (Lane.DRAFT, 0, "draft.forward", 5, 15),
                (Lane.DRAFT, 1, "draft.prepare, used by round 1", 20, 40),
                (Lane.VERIFY, 0, "verify.queue", 21, 22),
                (Lane.VERIFY, 0, "verify.forward", 22, 46),
                (Lane.VERIFY, 0, "verify.handling", 46, 47),
                (Lane.NETWORK, 0, "network, request to draft", 0, 4),
                (Lane.NETWORK, 0, "network, answer of draft", 15, 20),
                (Lane.NETWORK, 0, "network, request to verify", 20, 21),
                (Lane.NETWORK, 0, "network, answer of verify", 47, 48),
            ]
        )
        assert timeline.num_rows == {Lane.COORDINATOR: 2, Lane.DRAFT: 2, Lane.VERIFY: 1, Lane.NETWORK: 1}

    def test_finer_spans_count_before_attributes(self) -> None:
        spans = three_rounds()
        serve = next(span for span in spans if span.name == "verify.serve")
        trace = Trace()
        trace.spans = spans
        trace.add("verify.queue", 21, 24, serve.span_id)
        trace.add("verify.forward", 24, 45, serve.span_id)
        found = [bar for bar in laid_out(trace.spans).bars if bar.kind.lane is Lane.VERIFY]
        kinds = (BarKind.VERIFY_QUEUE, BarKind.VERIFY_FORWARD, BarKind.VERIFY_HANDLING)
        assert [bar.kind for bar in found[:3]] == [*kinds]
        assert [interval_ms(bar) for bar in found[:3]] == [(21, 24), (24, 45), (45, 47)]

    def test_a_span_that_goes_on_after_its_answer_is_no_handling(self) -> None:
        """The answer is still being written, while the coordinator has it already."""
        spans = [
            dataclasses.replace(span, end_ns=span.end_ns + 10 * MS) if span.name == "verify.serve" else span
            for span in three_rounds()
        ]
        expected = laid_out(three_rounds())
        assert [bar.interval for bar in laid_out(spans).bars] == [bar.interval for bar in expected.bars]

    def test_admission_and_time_outside_of_rounds(self) -> None:
        trace = Trace()
        root = trace.add("generate", 0, 100)
        trace.add("admission", 1, 30, root)
        for start_ms, end_ms in ((30.01, 50), (80, 100)):
            one = trace.add("round", start_ms, end_ms, root)
            trace.call("verify", (start_ms, end_ms), one, received_ms=start_ms, forward_ms=10)
        found = bars_of(laid_out(trace.spans), BarKind.ADMISSION, BarKind.OUTSIDE)
        assert [(bar.kind, bar.row, *interval_ms(bar)) for bar in found] == [
            (BarKind.OUTSIDE, 0, 0, 1),
            (BarKind.ADMISSION, 0, 1, 30),
            (BarKind.OUTSIDE, 0, 50, 80),
        ]

    def test_failed_attempts_and_events(self) -> None:
        trace = Trace()
        root = trace.add("generate", 0, 100, num_rounds=1)
        one = trace.add("round", 0, 100, root, events={"draft lost": 10.0}, outcome="timed_out")
        trace.add("draft", 0, 10, one, error="UNAVAILABLE", server__address="x")
        late = trace.add("draft", 10, 40, one, outcome="timed_out", handling_ms=30.0)
        trace.add("draft.serve", 12, 70, late, error="CANCELLED")
        trace.call("verify", (40, 90), one, received_ms=41, forward_ms=48)
        timeline = laid_out(trace.spans)
        found = {bar.title: bar for bar in timeline.bars}
        assert found["draft failed: UNAVAILABLE"].kind is BarKind.FAILED
        assert found["draft: no answer in time"].interval == (10 * MS, 40 * MS)
        assert found["draft.serve, not answered"].interval == (12 * MS, 70 * MS)
        assert found["draft lost"].interval == (10 * MS, 10 * MS)
        [shown] = timeline.rounds
        assert (shown.mark, shown.stages_ms[Stage.DRAFT]) == (Mark.LOST, 30)
        assert picture.facts(timeline)["hits"] == "no drafts"
        assert is_complete(choose(trace.spans))
        assert timeline.notes == [
            "The span generate says no stages: it is not of this version, or not of its end"
        ]
        assert "✖ draft lost" in picture.render(timeline)

    def test_a_proposal_that_was_under_way(self) -> None:
        """Its request arrives after the answer has left: that says nothing about clocks."""
        trace = Trace()
        root = trace.add("generate", 0, 100)
        one = trace.add("round", 0, 60, root, num_draft_tokens=4, outcome="begun")
        call = trace.add("draft", 0, 5, one, outcome="begun", network_ms=5.0)
        trace.add("draft.serve", 20, 21, call, handling_ms=1.0, queue_ms=0.0, forward_ms=0.0)
        call = trace.add("verify", 5, 60, one, outcome="begun", network_ms=55.0)
        trace.add("verify.serve", 58, 59, call, handling_ms=0.0, queue_ms=0.0, forward_ms=0.0)
        timeline = laid_out(trace.spans)
        assert [shown.mark for shown in timeline.rounds] == [Mark.BEGUN]
        assert not [note for note in timeline.notes if "clock" in note]
        assert not [note for note in timeline.notes if "no span" in note]
        titles = [bar.title for bar in bars_of(timeline, BarKind.NETWORK)]
        assert titles == [f"network, answer of {role}, begun ahead" for role in ("draft", "verify")]
        assert is_complete(choose(trace.spans[:-1])), "closed with its sequence"
        assert not is_complete(choose([span for span in trace.spans if span.name != "draft.serve"]))

    def test_stages_are_those_of_the_span_and_of_rounds_those_of_their_calls(self) -> None:
        """The former could be computed of all spans; they are read, whatever the others say."""
        spans = [span for span in three_rounds() if span.name in ("generate", "round")]
        assert picture.stage_facts(laid_out(spans)) == {
            "draft": "10.0 ms (10%)",
            "draft queue": "1.0 ms (1%)",
            "draft network": "9.0 ms (9%)",
            "verify": "69.0 ms (69%)",
            "verify queue": "1.0 ms (1%)",
            "verify network": "6.0 ms (6%)",
            "rule": "1.0 ms (1%)",
            "coordinator": "3.0 ms (3%)",
            "ahead": "18.0 ms, beside the others",
        }

        miss, hit, plain = laid_out(three_rounds()).rounds
        assert miss.stages_ms == {
            Stage.DRAFT: 10,
            Stage.DRAFT_QUEUE: 1,
            Stage.DRAFT_NETWORK: 9,
            Stage.VERIFY: 25,
            Stage.VERIFY_QUEUE: 1,
            Stage.VERIFY_NETWORK: 2,
        }
        assert [one.stages_ms[Stage.VERIFY] for one in (hit, plain)] == [27, 17]

    def test_without_prepared_work_one_row_is_enough(self) -> None:
        spans = [span for span in three_rounds() if span.name != "draft.prepare"]
        timeline = laid_out(spans)
        assert timeline.num_rows[Lane.DRAFT] == 1
        assert (timeline.overlap_share, timeline.overlaps) == (0, [])

    def test_a_window_of_rounds(self) -> None:
        timeline = laid_out(three_rounds(), range(1, 2))
        assert (timeline.start_ns, timeline.end_ns) == (50 * MS, 80 * MS)
        assert timeline.overlap_share == pytest.approx(10 / 30)
        assert picture.facts(timeline)["shown"] == "rounds 1 to 1, 30.0 ms"
        assert [one.number for one in timeline.rounds] == [1]
        with pytest.raises(ConfigError, match="--rounds 3:5: there are rounds 0 to 2"):
            laid_out(three_rounds(), range(3, 5))

    @pytest.mark.parametrize("clock_ms", [-70.0, 25.0, 3_600_000.0, 2.0, -3.0])
    def test_another_clock_is_corrected_and_said(self, clock_ms: float) -> None:
        """And what fits stays."""
        timeline = laid_out(three_rounds(draft_clock_ms=clock_ms))
        if abs(clock_ms) < 4:
            [forward] = bars_of(timeline, BarKind.DRAFT_FORWARD)
            assert (forward.start_ns, timeline.notes) == ((5 + clock_ms) * MS, [])
            return
        shift_ms = 10 - 9.5 - clock_ms  # the middle of the call is at 10, that of its spans at 9.5
        [forward] = bars_of(timeline, BarKind.DRAFT_FORWARD)
        assert forward.start_ns == pytest.approx((5 + clock_ms + shift_ms) * MS)
        prepared = [bar.start_ns / MS for bar in bars_of(timeline, BarKind.DRAFT_PREPARE)]
        assert prepared == pytest.approx([20.5, 52.5])
        assert timeline.notes == [
            f"The clock of the draft service differs: its spans are moved by {shift_ms:+.1f} ms"
        ]

    def test_a_shift_lets_every_call_keep_its_spans(self) -> None:
        trace = Trace()
        root = trace.add("generate", 0, 300)
        for i, (start, end) in enumerate([(2, 9), (1, 3), (2, 4)]):
            one = trace.add("round", 100 * i, 100 * i + 20, root)
            call = trace.add("verify", 100 * i, 100 * i + 10, one)
            times: dict[str, Any] = {"queue_ms": 0.0, "forward_ms": float(end - start), "handling_ms": 0.0}
            trace.add("verify.serve", 100 * i + start + 50, 100 * i + end + 50, call, **times)
        timeline = laid_out(trace.spans)
        first, *_ = bars_of(timeline, BarKind.VERIFY_FORWARD)
        assert interval_ms(first) == (3, 10)  # by the middles alone it would end at 11
        assert all(bar.start_ns % (100 * MS) < 10 * MS for bar in bars_of(timeline, BarKind.NETWORK))

    def test_what_is_missing_is_said(self) -> None:
        spans = three_rounds()
        hit = next(span for span in spans if span.attributes.get(names.DRAFT_PREPARED))
        timeline = laid_out([span for span in spans if span is not hit])
        assert timeline.notes == [
            "1 spans are left out: their parents are missing",
            "1 rounds are missing from the trace",
        ]

    def test_spans_of_callers_are_not_missed(self) -> None:
        caller = dataclasses.replace(three_rounds()[0], name="POST /v1/completions", span_id="f" * 16)
        root, *others = three_rounds()
        root = dataclasses.replace(root, parent_id=caller.span_id)
        assert laid_out([caller, root, *others]).notes == []

    def test_attributes_of_the_wrong_type_and_parents_in_a_circle_do_no_harm(self) -> None:
        trace = Trace()
        root = trace.add("generate", 0, 10, parent=f"{3:016x}", num_rounds="many")
        one = trace.add(
            "round", 0, 10, root, num_draft_tokens=-3, num_accepted_tokens=True, draft__prepared="yes"
        )
        call = trace.add("verify", 0, 10, one, network_ms="long", queue_ms=True, forward_ms=-1.0)
        trace.add("verify.serve", 0, 10, call, queue_ms=float("inf"), forward_ms=None, handling_ms=1)
        trace.add("network", 0, 10, one)
        timeline = laid_out(trace.spans)
        assert [one.labels[0] for one in timeline.rounds] == ["0: plain – 0/0"]
        (alone := Trace()).add("generate", 0, 0)
        ElementTree.fromstring(picture.render(laid_out(alone.spans)))


class TestChoosing:
    def test_several_are_listed_with_their_lengths(self) -> None:
        spans = three_rounds() + [dataclasses.replace(s, trace_id="cd" * 16) for s in three_rounds()[:4]]
        with pytest.raises(ConfigError) as caught:
            choose(spans)
        listed = f"{TRACE} (100.0 ms, 3 rounds), {'cd' * 16} (100.0 ms, 1 rounds)"
        assert str(caught.value) == f"choose one with --trace-id: {listed}"
        assert choose(spans, "CD" * 16).root.trace_id == "cd" * 16
        with pytest.raises(ConfigError, match="--trace-id ee: is not among them: abab"):
            choose(spans, "ee")
        with pytest.raises(ConfigError, match="no generate span"):
            choose(three_rounds()[1:])

    def test_two_generations_of_one_trace_are_told_apart_by_their_spans(self) -> None:
        trace = Trace()
        ids = [trace.add("generate", start, start + 5, parent="f" * 16) for start in (0, 10)]
        with pytest.raises(ConfigError, match=f"{TRACE} span {ids[0]} .*{TRACE} span {ids[1]} "):
            choose(trace.spans, TRACE)
        assert choose(trace.spans, ids[1]).root.span_id == ids[1]

    def test_complete_when_every_call_has_its_services_span(self) -> None:
        spans = three_rounds()
        assert is_complete(choose(spans))
        for name in ("round", "draft.serve", "verify", "verify.serve"):
            missing = next(span for span in spans if span.name == name)
            assert not is_complete(choose([span for span in spans if span is not missing])), name
        without = [span for span in spans if not span.name.startswith("verify.")]
        assert laid_out(without).notes == ["3 calls have no span of the service they went to"]
