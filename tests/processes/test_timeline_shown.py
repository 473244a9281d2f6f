"""A timeline as people see it: the picture, the command, and all of it from real services."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specwire.cli import main as cli
from specwire.completion import Stage
from specwire.errors import ConfigError
from specwire.telemetry import semantics as names
from tests.support.command_line import one_line_error, usage_error
from tests.support.processes import START_S, running, wait_until
from tests.support.traces import MS, Trace, exported, laid_out, saved, three_rounds
from tools.timeline import layout, perfetto, picture
from tools.timeline.generation import generations
from tools.timeline.receiver import SpanReceiver
from tools.timeline.spans import RecordedSpan

EMULATED = ["--target", "emulated:step_ms=10", "--draft", "emulated:step_ms=1,alpha=0.8"]
NASTY = "</script><img src=x onerror=alert(1)>\"'&$\\frac{"


SVG = "{http://www.w3.org/2000/svg}"


def _shown(text: str) -> list[str]:
    """All texts of a picture, those that a pointer shows too."""
    return [each.text or "" for each in ElementTree.fromstring(text).iter() if each.text]


class TestPicture:
    def test_is_self_contained(self) -> None:
        text = picture.render(laid_out(three_rounds()))
        found = list(ElementTree.fromstring(text).iter())
        assert {each.tag.removeprefix(SVG) for each in found} == {"svg", "rect", "path", "text", "title"}
        assert not {"href", "src", "style", "class", "id"} & {name for each in found for name in each.attrib}
        assert set(re.findall(r"https?://[^\"']+", text)) == {"http://www.w3.org/2000/svg"}

    def test_says_what_matters(self) -> None:
        """Of the whole, and of each bar for a pointer."""
        titles = _shown(picture.render(laid_out(three_rounds(draft_clock_ms=70))))
        text = "\n".join(titles)
        for part in (
            "One generation of target",
            "tokens: 9 · total time: 100.0 ms · rounds: 3 · hits: 50% (1 of 2)",
            "verify: 69.0 ms (69%)",
            "moved by -69.5 ms.",
            "1: hit ✓ 4/4",
            "→ 1",
            "draft.prepare, used by round 1",
            "\nstart: 22.000 ms\nduration: 24.000 ms\nservice: specwire-verify\nspan: ",
            "\nspecwire.batch_size: 1\n",
        ):
            assert part in text, part
        [miss] = [each for each in titles if each.startswith("0: miss ✗ 2/4\n")]
        assert "\ndraft_network: 9.00 ms\n" in miss

    def test_bars_are_where_their_times_are(self) -> None:
        """1300 pixels are 100 ms."""
        found = ElementTree.fromstring(picture.render(laid_out(three_rounds())))
        rects = [each for each in found.iter(f"{SVG}rect") if each.findtext(f"{SVG}title")]
        shown = {
            (title.splitlines()[0], float(each.attrib["x"])): float(each.attrib["width"])
            for each in rects
            if (title := each.findtext(f"{SVG}title"))
        }
        assert shown["verify.forward", 100 + 13 * 22] == 13 * 24
        assert shown["draft.prepare, used by round 1", 100 + 13 * 20] == 13 * 20
        assert shown["1: hit ✓ 4/4", 100 + 13 * 50] == 13 * 30 - 1

    def test_text_from_spans_is_escaped_and_cut(self) -> None:
        long = {"prompt": "x" * 100_000}
        spans = [
            dataclasses.replace(s, attributes={**s.attributes, **long, NASTY: NASTY, "\ud800": "\x00"})
            for s in three_rounds(model=NASTY)
        ]
        text = picture.render(laid_out(spans))
        assert len(text) < 60_000
        assert "<img" not in text
        shown = "\n".join(_shown(text))
        assert f"{NASTY}: {NASTY}" in shown
        assert "\ufffd: \ufffd" in shown

    def test_a_long_generation_shows_the_middle_or_what_is_asked_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path, out = saved(tmp_path / "long.json", _long(100)), tmp_path / "long.svg"
        assert cli.main(["timeline", str(path), "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        assert "shown: rounds 44 to 55, 120.0 ms" in out.read_text()
        assert cli.main(["timeline", str(path), "--out", str(out), "--rounds", "0:24"]) == 0
        assert "shown: rounds 0 to 23, 240.0 ms" in out.read_text()
        assert ElementTree.fromstring(out.read_text()).attrib["width"] == str(100 + 2 * 1300)


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
        assert found["otherData"]["trace_id"] == timeline.root.trace_id

    def test_overlapping_requests_are_on_several_threads(self) -> None:
        trace = Trace()
        root = trace.add("generate", 0, 50)
        trace.add("draft.prepare", 10, 30, root)
        trace.add("draft.prepare", 20, 40, root)
        events = perfetto.document(laid_out(trace.spans))["traceEvents"]
        _check_nesting(events)
        assert {e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "draft.prepare"} == {1, 2}


class TestReceiver:
    def test_memory_is_bounded(self) -> None:
        request = ExportTraceServiceRequest()
        ids = {"trace_id": b"t" * 16, "span_id": b"s" * 8}
        request.resource_spans.add().scope_spans.add().spans.add(name="x" * 1000, **ids)
        store = SpanReceiver(max_bytes=5000)
        for _ in range(10):
            store.keep(request)
        assert len(store.spans) == 4

    def test_a_port_in_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        with SpanReceiver() as receiver:
            address = receiver.endpoint.removeprefix("http://")
            with pytest.raises(ConfigError, match=f"{address}: cannot be listened on"):
                SpanReceiver(address).__enter__()


class TestCommand:
    @pytest.mark.parametrize(
        ("flags", "part"),
        [
            ([], "FILE --live --receive"),
            (["x.json", "--live"], "not allowed with"),
            (["x.json", "--rounds", "5:5"], "'5:5' is not A:B with A less than B"),
            (["x.json", "--rounds", "last"], "'last' is not A:B"),
            (["x.json", "--save", "spans.json"], "--save"),
        ],
    )
    def test_usage(self, flags: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert part in usage_error(["timeline", *flags], capsys)

    @pytest.mark.parametrize(
        ("flags", "part"),
        [
            (["/none/x.json"], "/none/x.json: cannot be read"),
            (["x.json", "--out", "/none/x.svg"], "--out /none/x.svg: cannot be written"),
            (["x.json", "--perfetto", "/tmp"], "--perfetto /tmp: cannot be written"),
            (["x.json", "--out", "x.png"], "--out x.png: the picture is an SVG, NAME.svg"),
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

    def test_writes_the_picture_and_perfettos_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = saved(tmp_path / "spans.json", three_rounds())
        outs = [str(tmp_path / "a.svg"), str(tmp_path / "a.json")]
        assert (
            cli.main(["timeline", str(path), "--rounds", "0:2", "--out", outs[0], "--perfetto", outs[1]]) == 0
        )
        assert capsys.readouterr().out.split() == outs
        assert "rounds 0 to 1" in Path(outs[0]).read_text()
        _check_nesting(json.loads(Path(outs[1]).read_text())["traceEvents"])

    def test_the_command_line_stays_light(self) -> None:
        heavy = "{'torch', 'grpc', 'matplotlib', 'opentelemetry'}"
        code = f"import sys, specwire.cli.main; print({heavy} & {{*sys.modules}})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "set()\n"


class TestThroughRealServices:
    @pytest.mark.slow
    def test_live(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn: list[layout.Timeline] = []
        make = layout.make

        def remembered(*args: Any) -> layout.Timeline:
            drawn.append(make(*args))
            return drawn[-1]

        monkeypatch.setattr(layout, "make", remembered)
        outs = [str(tmp_path / "live.svg"), str(tmp_path / "live.json")]
        flags = ["--live", *EMULATED, "--max-tokens", "24", "--rounds", "0:1000"]
        assert cli.main(["timeline", *flags, "--out", outs[0], "--perfetto", outs[1]]) == 0
        assert capsys.readouterr().out.split() == outs
        timeline = drawn[0]
        assert (timeline.root.count(names.GEN_AI_USAGE_OUTPUT_TOKENS), timeline.notes) == (24, [])
        assert len(timeline.rounds) == timeline.num_rounds
        assert sum(timeline.stages_ms.values()) == pytest.approx(timeline.root.duration_ns / MS, abs=1)
        # The target takes 10 ms a round, whatever else this machine does.
        assert timeline.stages_ms[Stage.VERIFY] >= 0.9 * 10 * timeline.num_rounds
        _check_nesting(json.loads(Path(outs[1]).read_text())["traceEvents"])

    def test_receive_draws_the_first_whole_generation(self, tmp_path: Path) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

        out = tmp_path / "got.svg"
        with running("timeline", "--receive", "127.0.0.1:0", "--out", str(out)) as command:
            wait_until(lambda: "\n" in command.errors(), START_S)
            address = re.search(r"http://(\S+)", command.errors())
            assert address, command.errors()
            _export(TraceServiceStub, address[1], three_rounds())
            assert command.ended() == 0
        assert "hits: 50% (1 of 2)" in out.read_text()
        assert "used by round 1" in out.read_text()


def _export(stub: Any, address: str, spans: list[RecordedSpan]) -> None:
    """The root first, and each of the others in a message of its own."""
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for span in spans:
            stub(channel).Export(exported(span), timeout=10)
        assert len(generations(spans)) == 1
