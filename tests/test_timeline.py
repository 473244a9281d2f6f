"""Timelines: spans read, laid out and drawn; by hand-made spans, and by those of a real stack."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specwire import cli, tracing
from specwire.errors import ConfigError
from specwire.timeline import layout, page, picture
from specwire.timeline.generation import choose, generations, is_complete
from specwire.timeline.intervals import difference, intersection, length, union
from specwire.timeline.layout import Kind, Lane, Mark
from specwire.timeline.receiver import Receiver, Store
from specwire.timeline.spans import Span, read, save
from tests.test_cli import one_line_error, usage_error

MS = 1_000_000
START_NS = 1_700_000_000 * 10**9
TRACE = "ab" * 16
EMULATED = ["--target", "emulated:step_ms=10", "--draft", "emulated:step_ms=1,alpha=0.8"]
NASTY = "</script><img src=x onerror=alert(1)>\"'&$\\frac{"


class Trace:
    """Spans by hand; times in milliseconds from the start of the generation."""

    def __init__(self, trace_id: str = TRACE) -> None:
        self.spans: list[Span] = []
        self._trace_id = trace_id

    def add(self, name: str, start_ms: float, end_ms: float, parent: str = "", **attributes: Any) -> str:
        span_id = f"{len(self.spans) + 1:016x}"
        role = name.partition(".")[0] if "." in name else "coordinator"
        self.spans.append(
            Span(
                name=name,
                trace_id=self._trace_id,
                span_id=span_id,
                parent_id=parent,
                start_ns=START_NS + round(start_ms * MS),
                end_ns=START_NS + round(end_ms * MS),
                attributes={f"specwire.{key.replace('__', '.')}": value for key, value in attributes.items()},
                resource={"service.name": f"specwire-{role}"},
            )
        )
        return span_id


def three_rounds(draft_clock_ms: float = 0, model: str = "target") -> list[Span]:
    """100 ms: a miss from 0 to 50, a hit from 50 to 80, a plain round from 80 to 100.

    draft: 5 to 15 on request; 20 to 40 and 52 to 62 prepared. Target: 22 to 47, 51 to 78, 81 to 98.
    """
    trace, off = Trace(), draft_clock_ms
    root = trace.add("generate", 0, 100, num_rounds=3)
    miss = trace.add("round", 0, 50, root, num_draft_tokens=4, num_accepted_tokens=2, base_len=9)
    draft = trace.add("draft", 0, 20, miss)
    trace.add("draft.queue", off + 4, off + 5, draft)
    trace.add("draft.forward", off + 5, off + 15, draft)
    verify = trace.add("verify", 20, 48, miss)
    trace.add("verify.queue", 21, 22, verify)
    trace.add("verify.forward", 22, 47, verify, batch_size=1)
    trace.add("draft.prepare", off + 20, off + 40, miss, base_len=13, num_outcomes=6)
    trace.add("accept", 48, 49, miss)
    hit = trace.add(
        "round", 50, 80, root, num_draft_tokens=4, num_accepted_tokens=4, draft__prepared=True, base_len=13
    )
    trace.add("draft", 50, 50, hit)
    verify = trace.add("verify", 50, 79, hit)
    trace.add("verify.forward", 51, 78, verify)
    trace.add("draft.prepare", off + 52, off + 62, hit, base_len=17, num_outcomes=6)
    plain = trace.add("round", 80, 100, root, num_draft_tokens=0, num_accepted_tokens=0)
    verify = trace.add("verify", 80, 99, plain)
    trace.add("verify.forward", 81, 98, verify)
    named = {tracing.GEN_AI_REQUEST_MODEL: model, tracing.GEN_AI_USAGE_OUTPUT_TOKENS: 9}
    trace.spans[0] = dataclasses.replace(trace.spans[0], attributes=trace.spans[0].attributes | named)
    return trace.spans


def laid_out(spans: list[Span], numbers: range | None = None) -> layout.Timeline:
    return layout.make(choose(spans), numbers)


def saved(path: Path, spans: list[Span]) -> Path:
    save(path, spans)
    return path


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
}


def otlp(**changes: Any) -> dict[str, Any]:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "specwire-draft"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [OTLP_SPAN | changes]}]}]}


class TestReading:
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
    def test_all_forms(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "spans.json"
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

    def test_jaegers_download(self, tmp_path: Path) -> None:
        span = {
            "traceID": TRACE,
            "spanID": "0000000000000002",
            "operationName": "round",
            "references": [{"refType": "CHILD_OF", "traceID": TRACE, "spanID": "0000000000000001"}],
            "startTime": 5,
            "duration": 2,
            "tags": [{"key": "specwire.round", "type": "int64", "value": 3}],
            "processID": "p1",
        }
        trace = {"traceID": TRACE, "spans": [span], "processes": {"p1": {"serviceName": "c", "tags": []}}}
        path = tmp_path / "jaeger.json"
        path.write_text(json.dumps({"data": [trace]}, indent=2))
        [found] = read(path)
        assert (found.name, found.parent_id, found.service_name) == ("round", "0000000000000001", "c")
        assert (found.start_ns, found.end_ns, found.attributes) == (5000, 7000, {"specwire.round": 3})

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", ": is empty"),
            ("hello", ", line 1, column 1: is not JSON"),
            ("{}\n{}\n{,}\n", ", line 3, column 2: is not JSON"),
            ('[\n{"resourceSpans": []},\n]', ", line 3, column 1: is not JSON"),
            ("[" * 100_000, ": is not JSON"),
            ("5", ", line 1: is not an object"),
            ('{"resourceLogs": []}', ", line 1: has no resourceSpans"),
            ('{}\n{"resourceSpans": 1}', ", line 2: resourceSpans: is not a list"),
            (
                otlp(spanId="1"),
                ", line 1: resourceSpans[0].scopeSpans[0].spans[0].spanId: is not 8 bytes in hex",
            ),
            (otlp(traceId=None), "spans[0].traceId: is not a string"),
            (otlp(startTimeUnixNano="soon"), "spans[0].startTimeUnixNano: is not a whole number"),
            (otlp(startTimeUnixNano=-1), "spans[0].startTimeUnixNano: is not a time in nanoseconds"),
            (otlp(endTimeUnixNano="7"), "spans[0]: ends before it starts"),
            (otlp(attributes=[{"value": {}}]), "spans[0].attributes[0]: has no key"),
            (
                otlp(attributes=[{"key": "k", "value": {"x": 1}}]),
                "attributes[0].value: is not one of stringValue",
            ),
            (otlp(attributes=[{"key": "k", "value": {"boolValue": 1}}]), "boolValue: is not true or false"),
            ({"data": [{"spans": [{"processID": "p"}]}]}, "data[0].processes: has no p"),
        ],
    )
    def test_what_is_malformed_is_named(
        self, text: str | dict[str, Any], problem: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "spans.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
            read(path)
        assert str(caught.value).startswith(str(path))

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="none: cannot be read"):
            read(tmp_path / "none")

    def test_what_is_saved_is_read_back(self, tmp_path: Path) -> None:
        spans = [*three_rounds(), *_spans_of(tmp_path, otlp())]
        assert read(saved(tmp_path / "saved.json", spans)) == spans

    def test_many_spans_are_several_lines(self, tmp_path: Path) -> None:
        spans = three_rounds() * 100
        path = saved(tmp_path / "saved.json", [dataclasses.replace(s, resource={}) for s in spans])
        assert len(path.read_text().splitlines()) == -(-len(spans) // 512)
        assert len(read(path)) == len(spans)


def _spans_of(tmp_path: Path, document: dict[str, Any]) -> list[Span]:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(document))
    return read(path)


class TestIntervals:
    def test_by_hand(self) -> None:
        left, right = union([(0, 4), (2, 6), (9, 9), (8, 10)]), [(1, 3), (5, 9)]
        assert left == [(0, 6), (8, 10)]
        assert intersection(left, right) == [(1, 3), (5, 6), (8, 9)]
        assert difference(left, right) == [(0, 1), (3, 5), (9, 10)]
        assert difference(left, []) == left
        assert difference([], right) == []
        assert length(left) == 8

    def test_parts_add_up(self) -> None:
        left = [(i, i + i % 5) for i in range(0, 100, 7)]
        for shift in range(-5, 110, 3):
            right = union((start + shift, end + shift + 1) for start, end in left)
            whole = union(left)
            assert length(intersection(whole, right)) + length(difference(whole, right)) == length(whole)


class TestLayout:
    def test_marks_and_labels(self) -> None:
        rounds = laid_out(three_rounds()).rounds
        assert [one.mark for one in rounds] == [Mark.MISS, Mark.HIT, Mark.PLAIN]
        assert [one.labels[0] for one in rounds] == ["0: miss ✗ 2/4", "1: hit ✓ 4/4", "2: plain – 0/0"]

    def test_lanes(self) -> None:
        timeline = laid_out(three_rounds())
        found = [
            (bar.lane, bar.row, bar.title, bar.start_ns / MS, bar.end_ns / MS)
            for bar in timeline.bars
            if bar.start_ns < 50 * MS
        ]
        assert sorted(found) == sorted(
            [
                (Lane.COORDINATOR, 0, "round", 0, 50),
                (Lane.COORDINATOR, 1, "accept", 48, 49),
                (Lane.DRAFT, 0, "draft.queue", 4, 5),
                (Lane.DRAFT, 0, "draft.forward", 5, 15),
                (Lane.DRAFT, 1, "draft.prepare", 20, 40),
                (Lane.VERIFY, 0, "verify.queue", 21, 22),
                (Lane.VERIFY, 0, "verify.forward", 22, 47),
                (Lane.NETWORK, 0, "network, request to draft", 0, 4),
                (Lane.NETWORK, 0, "network, answer of draft", 15, 20),
                (Lane.NETWORK, 0, "network, request to verify", 20, 21),
                (Lane.NETWORK, 0, "network, answer of verify", 47, 48),
            ]
        )
        assert timeline.num_rows == {Lane.COORDINATOR: 2, Lane.DRAFT: 2, Lane.VERIFY: 1, Lane.NETWORK: 1}

    def test_shares_are_exact(self) -> None:
        timeline = laid_out(three_rounds())
        assert timeline.overlaps == [(22 * MS, 40 * MS), (52 * MS, 62 * MS)]
        assert timeline.shares.both == pytest.approx(0.28)
        assert timeline.shares.target == pytest.approx((25 + 27 + 17) / 100)
        assert timeline.shares.draft == pytest.approx((10 + 20 + 10) / 100)
        # 0-4, 15-20, 47-48, 50-51, 78-79, 80-81, 98-99: not 20-21, when the draft prepares
        assert timeline.shares.only_network == pytest.approx(0.14)

    def test_times_of_rounds(self) -> None:
        found = [
            tuple(ns / MS for ns in (one.draft_ns, one.prepare_ns, one.verify_ns, one.network_ns))
            for one in laid_out(three_rounds()).rounds
        ]
        assert found == [(11, 20, 26, 11), (0, 10, 27, 2), (0, 0, 17, 2)]

    def test_without_prepared_work_one_row_is_enough(self) -> None:
        spans = [span for span in three_rounds() if span.name != "draft.prepare"]
        timeline = laid_out(spans)
        assert timeline.num_rows[Lane.DRAFT] == 1
        assert (timeline.shares.both, timeline.overlaps) == (0, [])

    def test_a_window_of_rounds(self) -> None:
        timeline = laid_out(three_rounds(), range(1, 2))
        assert (timeline.start_ns, timeline.end_ns, timeline.is_part) == (50 * MS, 80 * MS, True)
        assert timeline.shares.both == pytest.approx(10 / 30)
        assert [one.number for one in timeline.rounds] == [1]
        with pytest.raises(ConfigError, match="--rounds 3:5: there are rounds 0 to 2"):
            laid_out(three_rounds(), range(3, 5))

    @pytest.mark.parametrize("clock_ms", [-70.0, 25.0, 3_600_000.0])
    def test_another_clock_is_corrected_and_said(self, clock_ms: float) -> None:
        timeline = laid_out(three_rounds(draft_clock_ms=clock_ms))
        shift_ms = 10 - 9.5 - clock_ms  # the middle of the call is at 10, that of its spans at 9.5
        [forward] = [bar for bar in timeline.bars if bar.kind is Kind.DRAFT_FORWARD]
        assert forward.start_ns == pytest.approx((5 + clock_ms + shift_ms) * MS)
        prepared = [bar.start_ns / MS for bar in timeline.bars if bar.kind is Kind.DRAFT_PREPARE]
        assert prepared == pytest.approx([20.5, 52.5])
        assert timeline.notes == [
            f"The clock of the draft service differs: its spans are moved by {shift_ms:+.1f} ms"
        ]

    @pytest.mark.parametrize("clock_ms", [0.0, 2.0, -3.0])
    def test_what_fits_stays(self, clock_ms: float) -> None:
        timeline = laid_out(three_rounds(draft_clock_ms=clock_ms))
        [forward] = [bar for bar in timeline.bars if bar.kind is Kind.DRAFT_FORWARD]
        assert forward.start_ns == (5 + clock_ms) * MS
        assert timeline.notes == []

    def test_a_shift_lets_every_call_keep_its_spans(self) -> None:
        trace = Trace()
        root = trace.add("generate", 0, 300)
        for i, (start, end) in enumerate([(2, 9), (1, 3), (2, 4)]):
            one = trace.add("round", 100 * i, 100 * i + 20, root)
            call = trace.add("verify", 100 * i, 100 * i + 10, one)
            trace.add("verify.forward", 100 * i + start + 50, 100 * i + end + 50, call)
        timeline = laid_out(trace.spans)
        [first, *_] = [bar for bar in timeline.bars if bar.kind is Kind.VERIFY_FORWARD]
        assert (first.start_ns, first.end_ns) == (3 * MS, 10 * MS)  # by the middles alone it would end at 11
        assert all(bar.start_ns % (100 * MS) < 10 * MS for bar in timeline.bars if bar.kind is Kind.NETWORK)

    def test_a_service_without_spans(self) -> None:
        spans = [span for span in three_rounds() if not span.name.startswith("verify.")]
        timeline = laid_out(spans)
        assert timeline.notes == ["3 calls have no span of the service they went to"]
        assert timeline.shares.target == 0
        assert not is_complete(choose(spans))

    def test_what_is_missing_is_said(self) -> None:
        spans = three_rounds()
        hit = next(span for span in spans if span.attributes.get(tracing.DRAFT_PREPARED))
        timeline = laid_out([span for span in spans if span is not hit])
        assert timeline.notes == [
            "3 spans are left out: their parents are missing",
            "1 rounds are missing from the trace",
        ]

    def test_attributes_of_the_wrong_type_and_parents_in_a_circle_do_no_harm(self) -> None:
        trace = Trace()
        root = trace.add("generate", 0, 10, parent=f"{3:016x}", num_rounds="many")
        one = trace.add(
            "round", 0, 10, root, num_draft_tokens=-3, num_accepted_tokens=True, draft__prepared="yes"
        )
        trace.add("verify", 0, 10, one)
        trace.add("network", 0, 10, one)
        timeline = laid_out(trace.spans)
        assert [one.labels[0] for one in timeline.rounds] == ["0: plain – 0/0"]

    def test_a_generation_without_rounds(self, tmp_path: Path) -> None:
        trace = Trace()
        trace.add("generate", 0, 0)
        timeline = laid_out(trace.spans)
        page.write(tmp_path / "empty.html", timeline)
        picture.draw(tmp_path / "empty.png", timeline, timeline)


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

    def test_two_generations_of_one_trace_are_told_apart_by_their_spans(self) -> None:
        trace = Trace()
        ids = [trace.add("generate", start, start + 5, parent="f" * 16) for start in (0, 10)]
        with pytest.raises(ConfigError, match=f"{TRACE} span {ids[0]} .*{TRACE} span {ids[1]} "):
            choose(trace.spans, TRACE)
        assert choose(trace.spans, ids[1]).root.span_id == ids[1]

    def test_none(self) -> None:
        with pytest.raises(ConfigError, match="no generate span"):
            choose(three_rounds()[1:])

    def test_spans_that_were_exported_twice_count_once(self) -> None:
        assert len(laid_out(three_rounds() * 2).rounds) == 3

    def test_complete_when_every_call_has_its_services_span(self) -> None:
        spans = three_rounds()
        assert is_complete(choose(spans))
        for name in ("round", "draft.forward", "verify", "verify.forward"):
            missing = next(span for span in spans if span.name == name)
            assert not is_complete(choose([span for span in spans if span is not missing])), name


class _Found(html.parser.HTMLParser):
    """What a browser would see as elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)


class TestPage:
    def test_is_self_contained(self) -> None:
        text = page.render(laid_out(three_rounds()))
        found = _Found(text)
        assert not {"link", "img", "iframe", "object", "base"} & set(found.tags)
        assert not {"src", "href", "xlink:href", "srcset", "action"} & {name for name, _ in found.attributes}
        assert "default-src 'none'" in text
        assert set(re.findall(r"https?://[^\"']+", text)) == {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)

    def test_says_what_matters(self) -> None:
        text = page.render(laid_out(three_rounds(draft_clock_ms=70)))
        for name, value in [("tokens", "9"), ("total time", "100.0 ms"), ("hits", "50% (1 of 2)")]:
            assert f"<dt>{name}</dt><dd>{value}</dd>" in text
        assert "moved by -69.5 ms" in text
        assert 'role="img"' in text
        assert text.count("<tr>") == 1 + 3
        assert '<td class="mark hit">hit</td>' in text

    def test_text_from_spans_is_escaped(self, tmp_path: Path) -> None:
        spans = three_rounds(model=NASTY)
        spans = [
            dataclasses.replace(s, attributes={**s.attributes, NASTY: NASTY, "\ud800": "\x00"}) for s in spans
        ]
        path = tmp_path / "page.html"
        page.write(path, laid_out(spans))
        found = _Found(path.read_text(encoding="utf-8"))
        assert "img" not in found.tags
        assert "onerror" not in {name for name, _ in found.attributes}
        assert len(found.scripts) == 2
        texts = json.loads(found.scripts[0])["texts"]
        assert NASTY in texts
        assert "\ufffd" in texts

    def test_the_script_gets_what_it_draws(self) -> None:
        data = json.loads(_Found(page.render(laid_out(three_rounds()))).scripts[0])
        [forward, *_] = data["bars"]["verify-forward"]
        assert forward[:2] == [22 * MS, 47 * MS]
        assert data["texts"][forward[3]] == "verify.forward"
        words = [data["texts"][i] for i in data["spans"][forward[4]]]
        assert dict(zip(words[::2], words[1::2], strict=True))["specwire.batch_size"] == "1"

    def test_long_values_are_cut(self) -> None:
        spans = [dataclasses.replace(s, attributes={"prompt": "x" * 100_000}) for s in three_rounds()]
        assert len(page.render(laid_out(spans))) < 60_000

    def test_two_thousand_rounds(self, tmp_path: Path) -> None:
        started_s = time.monotonic()
        spans = _long(2000)
        timeline = laid_out(spans)
        page.write(tmp_path / "long.html", timeline)
        assert len(timeline.rounds) == 2000
        assert (tmp_path / "long.html").stat().st_size < 4 << 20
        assert time.monotonic() - started_s < 20


def _long(num_rounds: int) -> list[Span]:
    trace = Trace()
    root = trace.add("generate", 0, num_rounds * 10)
    for i in range(num_rounds):
        start = i * 10
        one = trace.add("round", start, start + 10, root, num_draft_tokens=4, num_accepted_tokens=i % 5)
        for name, begin, end in (("draft", start, start + 4), ("verify", start + 4, start + 9)):
            call = trace.add(name, begin, end, one)
            trace.add(f"{name}.queue", begin + 0.5, begin + 0.6, call)
            trace.add(f"{name}.forward", begin + 0.6, end - 0.5, call)
    return trace.spans


class TestPicture:
    def test_is_a_png_with_something_in_it(self, tmp_path: Path) -> None:
        from matplotlib.image import imread

        timeline = laid_out(three_rounds(draft_clock_ms=70, model=NASTY))
        picture.draw(tmp_path / "p.png", timeline, timeline)
        pixels = imread(tmp_path / "p.png")
        assert pixels.shape[1] > 1500
        for colour in (picture.COLOURS[Kind.VERIFY_FORWARD], picture.COLOURS[Kind.DRAFT_PREPARE]):
            wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            assert (abs(pixels[..., :3] - wanted).max(axis=-1) < 0.01).sum() > 3000

    def test_a_long_generation_shows_a_readable_part(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = saved(tmp_path / "long.json", _long(100))
        assert cli.main(["timeline", str(path), "--out", str(tmp_path / "long.png")]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'long.png'}\n"

    def test_without_matplotlib(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert "needs matplotlib" in one_line_error(2, ["timeline", "x.json", "--out", "x.png"], capsys)


class TestReceiver:
    def test_memory_is_bounded(self) -> None:
        request = ExportTraceServiceRequest()
        request.resource_spans.add().scope_spans.add().spans.add(name="x" * 1000)
        store = Store(max_bytes=5000)
        for _ in range(10):
            store.keep(request)
        assert (len(store.spans), store.num_forgotten) == (4, 6)

    def test_a_port_in_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Receiver() as receiver:
            address = receiver.endpoint.removeprefix("http://")
            with pytest.raises(ConfigError, match=f"{address}: cannot be listened on"):
                Receiver(address).__enter__()


class TestCommand:
    @pytest.mark.parametrize(
        ("flags", "part"),
        [
            ([], "FILE --live --receive"),
            (["x.json", "--live"], "not allowed with"),
            (["x.json", "--rounds", "5:5"], "'5:5' is not A:B with A less than B"),
            (["x.json", "--rounds", "last"], "'last' is not A:B"),
        ],
    )
    def test_usage(self, flags: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert part in usage_error(["timeline", *flags], capsys)

    @pytest.mark.parametrize(
        ("flags", "part"),
        [
            (["/none/x.json"], "/none/x.json: cannot be read"),
            (["x.json", "--out", "/none/x.html"], "--out /none/x.html: cannot be written"),
            (["x.json", "--save", "/tmp"], "--save /tmp: cannot be written"),
            (["x.json", "--target", "embedded"], "--target: needs --live"),
            (["x.json", "--seed", "1"], "--seed: needs --live"),
            (["--receive", "127.0.0.1:1", "--prompt", "x"], "--prompt: needs --live"),
            (["--receive", "here"], "--receive here: is not HOST:PORT"),
            (["--live", "--target", "/none/such"], "--target /none/such: no such model directory"),
        ],
    )
    def test_errors(self, flags: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert part in one_line_error(2, ["timeline", *flags], capsys)

    def test_the_file_is_named_when_a_generation_cannot_be_chosen(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = saved(tmp_path / "spans.json", three_rounds()[1:])
        assert f"{path}: no generate span" in one_line_error(2, ["timeline", str(path)], capsys)

    def test_a_stem_writes_both(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = saved(tmp_path / "spans.json", three_rounds())
        assert cli.main(["timeline", str(path), "--rounds", "0:2", "--out", str(tmp_path / "v1.2")]) == 0
        assert capsys.readouterr().out.split() == [f"{tmp_path}/v1.2.html", f"{tmp_path}/v1.2.png"]
        assert "rounds 0 to 1" in (tmp_path / "v1.2.html").read_text()

    def test_the_command_line_stays_light(self) -> None:
        heavy = "{'torch', 'grpc', 'matplotlib', 'opentelemetry'}"
        code = f"import sys, specwire.cli; print({heavy} & {{*sys.modules}})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "set()\n"


class TestThroughRealServices:
    def test_live_and_its_saved_spans(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        kept = tmp_path / "spans.json"
        flags = [
            "--live",
            *EMULATED,
            "--max-tokens",
            "24",
            "--save",
            str(kept),
            "--out",
            str(tmp_path / "live"),
        ]
        assert cli.main(["timeline", *flags]) == 0
        assert capsys.readouterr().out.split() == [f"{tmp_path}/live.html", f"{tmp_path}/live.png"]
        generation = choose(read(kept))
        assert is_complete(generation)
        timeline = layout.make(generation)
        assert (timeline.num_tokens, timeline.notes) == (24, [])
        assert len(timeline.rounds) == timeline.num_rounds == generation.root.attributes[tracing.NUM_ROUNDS]
        # The target takes 10 ms a round, whatever else this machine does.
        busy_ns = timeline.shares.target * timeline.total_ns
        assert busy_ns >= 0.9 * 10 * MS * timeline.num_rounds
        for one in timeline.rounds:
            parts_ns = one.draft_ns + one.verify_ns + one.network_ns
            assert parts_ns <= one.end_ns - one.start_ns + MS
        assert cli.main(["timeline", str(kept), "--out", str(tmp_path / "again.html")]) == 0
        assert (tmp_path / "again.html").read_text() == (tmp_path / "live.html").read_text()

    def test_receive_draws_the_first_whole_generation(self, tmp_path: Path) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

        out = tmp_path / "got.html"
        process = subprocess.Popen(
            [sys.executable, "-m", "specwire.cli", "timeline", "--receive", "127.0.0.1:0", "--out", str(out)],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            address = re.search(r"http://(\S+)", line)
            assert address, line
            threading.Thread(target=process.stderr.read, daemon=True).start()
            _export(TraceServiceStub, address[1], three_rounds())
            assert process.wait(30) == 0
        finally:
            process.kill()
        assert "hits</dt><dd>50% (1 of 2)" in out.read_text()


def _export(stub: Any, address: str, spans: list[Span]) -> None:
    """The root first, and each of the others in a message of its own."""
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for span in spans:
            request = ExportTraceServiceRequest()
            made = (
                request.resource_spans.add()
                .scope_spans.add()
                .spans.add(
                    name=span.name,
                    trace_id=bytes.fromhex(span.trace_id),
                    span_id=bytes.fromhex(span.span_id),
                    parent_span_id=bytes.fromhex(span.parent_id),
                    start_time_unix_nano=span.start_ns,
                    end_time_unix_nano=span.end_ns,
                )
            )
            for key, value in span.attributes.items():
                pair = made.attributes.add(key=key)
                kind = {bool: "bool_value", int: "int_value", str: "string_value"}[type(value)]
                setattr(pair.value, kind, value)
            stub(channel).Export(request, timeout=10)
        assert len(generations(spans)) == 1
