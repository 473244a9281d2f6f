"""A timeline as people see it: the page, the picture, the command, and all of it from real services."""

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

from specwire.cli import main as cli
from specwire.cli.timeline import layout, page, perfetto, picture
from specwire.cli.timeline.generation import choose, generations, is_complete
from specwire.cli.timeline.layout import BarKind
from specwire.cli.timeline.receiver import Receiver, Store
from specwire.cli.timeline.spans import RecordedSpan, read
from specwire.completion import Stage
from specwire.errors import ConfigError
from specwire.telemetry import semantics as names
from tests.support.command_line import one_line_error, usage_error
from tests.support.traces import MS, Trace, laid_out, saved, three_rounds

EMULATED = ["--target", "emulated:step_ms=10", "--draft", "emulated:step_ms=1,alpha=0.8"]
NASTY = "</script><img src=x onerror=alert(1)>\"'&$\\frac{"


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
        shown = {"tokens": "9", "total time": "100.0 ms", "hits": "50% (1 of 2)", "verify": "69.0 ms (69%)"}
        for name, value in shown.items():
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
        assert forward[:2] == [22 * MS, 46 * MS]
        assert data["texts"][forward[3]] == "verify.forward"
        words = [data["texts"][i] for i in data["spans"][forward[4]]]
        assert dict(zip(words[::2], words[1::2], strict=True))["specwire.batch_size"] == "1"

    def test_long_values_are_cut(self) -> None:
        spans = [dataclasses.replace(s, attributes={"prompt": "x" * 100_000}) for s in three_rounds()]
        assert len(page.render(laid_out(spans))) < 60_000

    @pytest.mark.slow
    def test_two_thousand_rounds(self, tmp_path: Path) -> None:
        started_s = time.monotonic()
        spans = _long(2000)
        timeline = laid_out(spans)
        page.write(tmp_path / "long.html", timeline)
        assert len(timeline.rounds) == 2000
        assert (tmp_path / "long.html").stat().st_size < 4 << 20
        assert time.monotonic() - started_s < 20


def _long(num_rounds: int) -> list[RecordedSpan]:
    trace = Trace()
    root = trace.add("generate", 0, num_rounds * 10)
    for i in range(num_rounds):
        start = i * 10
        one = trace.add("round", start, start + 10, root, num_draft_tokens=4, num_accepted_tokens=i % 5)
        for role, begin, end in (("draft", start, start + 4), ("verify", start + 4, start + 9)):
            work_ms = end - begin - 1.1
            trace.call(role, (begin, end), one, received_ms=begin + 0.5, queue_ms=0.1, forward_ms=work_ms)
    return trace.spans


class TestPicture:
    def test_is_a_png_with_something_in_it(self, tmp_path: Path) -> None:
        from matplotlib.image import imread

        timeline = laid_out(three_rounds(draft_clock_ms=70, model=NASTY))
        picture.draw(tmp_path / "p.png", timeline, timeline)
        pixels = imread(tmp_path / "p.png")
        assert pixels.shape[1] > 1500
        for colour in (picture.COLOURS[BarKind.VERIFY_FORWARD], picture.COLOURS[BarKind.DRAFT_PREPARE]):
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


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of a thread lie within each other or apart; each process has a name."""
    slices = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    named = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {e["pid"] for e in slices} <= named
    open_until: dict[tuple[int, int], list[float]] = {}
    for one in slices:
        ends = open_until.setdefault((one["pid"], one["tid"]), [])
        while ends and ends[-1] <= one["ts"] + 1e-6:
            ends.pop()
        end = one["ts"] + one["dur"]
        assert not ends or end <= ends[-1] + 1e-6, one
        ends.append(end)


class TestPerfetto:
    def test_slices_add_up_to_the_stages(self) -> None:
        timeline = laid_out(three_rounds(draft_clock_ms=70))
        found = json.loads(json.dumps(perfetto.document(timeline)))
        events = found["traceEvents"]
        _check_nesting(events)
        spent_ms: dict[str, float] = {}
        for one in events:
            if one["ph"] == "X":
                spent_ms[one["cat"]] = spent_ms.get(one["cat"], 0) + one["dur"] / 1e3
        stages_ms = timeline.stages_ms
        assert spent_ms["verify.queue"] == stages_ms[Stage.VERIFY_QUEUE]
        assert spent_ms["verify.forward"] + spent_ms["verify.handling"] == stages_ms[Stage.VERIFY]
        assert spent_ms["draft.forward"] == stages_ms[Stage.DRAFT]
        assert spent_ms["network"] == stages_ms[Stage.VERIFY_NETWORK] + stages_ms[Stage.DRAFT_NETWORK]
        assert spent_ms["generate"] == spent_ms["round"] == 100
        assert found["otherData"]["trace_id"] == timeline.trace_id

    def test_overlapping_requests_are_on_several_threads(self) -> None:
        trace = Trace()
        root = trace.add("generate", 0, 50)
        trace.add("draft.prepare", 10, 30, root)
        trace.add("draft.prepare", 20, 40, root)
        events = perfetto.document(laid_out(trace.spans))["traceEvents"]
        _check_nesting(events)
        assert {e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "draft.prepare"} == {0, 1}


class TestReceiver:
    def test_memory_is_bounded(self) -> None:
        request = ExportTraceServiceRequest()
        request.resource_spans.add().scope_spans.add().spans.add(name="x" * 1000)
        store = Store(max_bytes=5000)
        for _ in range(10):
            store.keep(request)
        assert (len(store.spans), store.num_dropped) == (4, 6)

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
        code = f"import sys, specwire.cli.main; print({heavy} & {{*sys.modules}})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "set()\n"


class TestThroughRealServices:
    @pytest.mark.slow
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
            "--perfetto",
            str(tmp_path / "live.json"),
        ]
        assert cli.main(["timeline", *flags]) == 0
        files = [f"{tmp_path}/live.{ending}" for ending in ("html", "png", "json")]
        assert capsys.readouterr().out.split() == files
        generation = choose(read(kept))
        assert is_complete(generation)
        timeline = layout.make(generation)
        assert (timeline.num_tokens, timeline.notes) == (24, [])
        assert len(timeline.rounds) == timeline.num_rounds == generation.root.attributes[names.NUM_ROUNDS]
        assert sum(timeline.stages_ms.values()) == pytest.approx(timeline.total_ns / MS, abs=1)
        # The target takes 10 ms a round, whatever else this machine does.
        assert timeline.stages_ms[Stage.VERIFY] >= 0.9 * 10 * timeline.num_rounds
        for stage in layout.ROUND_STAGES:
            of_rounds_ms = sum(one.stages_ms[stage] for one in timeline.rounds)
            assert of_rounds_ms == pytest.approx(timeline.stages_ms.get(stage, 0), abs=0.1), stage
        for one in timeline.rounds:
            assert sum(one.stages_ms.values()) <= (one.end_ns - one.start_ns) / MS + 1
        _check_nesting(json.loads((tmp_path / "live.json").read_text())["traceEvents"])
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
        assert "used by round 1" in out.read_text()


_FIELDS = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}


def _export(stub: Any, address: str, spans: list[RecordedSpan]) -> None:
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
                setattr(pair.value, _FIELDS[type(value)], value)
            for link in span.links:
                made.links.add(trace_id=bytes.fromhex(link.trace_id), span_id=bytes.fromhex(link.span_id))
            stub(channel).Export(request, timeout=10)
        assert len(generations(spans)) == 1
