"""The command line of `specwire timeline`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwire.cli.process import end_on_signals
from specwire.config import extras
from specwire.config.fields import split_address
from specwire.config.flags import flag_name, read_config
from specwire.config.parser import add_flags
from specwire.config.sampling_flags import add_sampling_flags, sampling_params, token_ids
from specwire.config.stack import LiveConfig
from specwire.core import SamplingParams
from specwire.errors import ConfigError
from tools import files
from tools.timeline import layout, perfetto, picture
from tools.timeline import spans as span_files
from tools.timeline.generation import GenerationTrace, choose, generations, is_complete
from tools.timeline.spans import RecordedSpan

if TYPE_CHECKING:
    from tools.timeline.receiver import SpanReceiver

_ABOUT = "draw a timeline of one generation from its spans"
_EXAMPLES = """\
examples:
  specwire timeline spans.json                        OTLP JSON (or Jaeger's) to timeline.svg
  specwire timeline spans.json --rounds 8:40          rounds 8 to 39, as wide as they need
  specwire timeline --live --prompt "import os"       start everything, generate, draw that
  specwire timeline --receive 0.0.0.0:4317            be the collector of services that run
                                                      elsewhere; draw their next generation
"""
_ROUNDS = f"show rounds A to B - 1 (default: all, and in the picture the {picture.MAX_ROUNDS} in the middle)"
_SETTLE_S = 15.0
"""Wait for the services' spans after the root: exporters send every 5 s by default."""
_EXPORT_ALL = {
    "OTEL_SDK_DISABLED": "false",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_TRACES_SAMPLER": "always_on",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
    "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
    "no_grpc_proxy": "127.0.0.1",
}
"""Variables with which services export every span, overriding this process's own."""


def add_command(commands: Any) -> None:
    timeline: argparse.ArgumentParser = commands.add_parser(
        "timeline",
        help=_ABOUT,
        description=_ABOUT[0].upper() + _ABOUT[1:] + ".",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = timeline.add_mutually_exclusive_group(required=True)
    about = "spans, as the collector writes them"
    source.add_argument("file", nargs="?", type=Path, metavar="FILE", help=about)
    source.add_argument("--live", action="store_true", help="run the three services here and generate once")
    source.add_argument("--receive", metavar="HOST:PORT", help="wait there for a generation's spans")
    prompt = timeline.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, with --live")
    prompt.add_argument("--token-ids", type=token_ids, metavar="1,2,3", help="the prompt as token ids")
    about = "which generation, if there are several"
    timeline.add_argument("--trace-id", default="", metavar="HEX", help=about)
    timeline.add_argument("--rounds", type=_rounds, metavar="A:B", help=_ROUNDS)
    about = "the picture, an SVG that browsers open (default timeline.svg)"
    timeline.add_argument("--out", type=Path, default=Path("timeline.svg"), metavar="FILE", help=about)
    about = "write it for ui.perfetto.dev too (Trace Event JSON)"
    timeline.add_argument("--perfetto", type=Path, metavar="FILE", help=about)
    add_flags(timeline.add_argument_group("services, with --live"), LiveConfig)
    omit = ("rule", "num_draft_tokens", "max_depth", "draft")
    add_sampling_flags(timeline, omit=omit, max_tokens=64)
    timeline.set_defaults(run=run)


def _rounds(text: str) -> range:
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    numbers = range(int(match[1]), int(match[2])) if match else range(0)
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B with A less than B")
    return numbers


def run(args: argparse.Namespace) -> int:
    """Get the spans and draw them.

    Raises:
        ConfigError: an invalid flag or file; output paths are checked before anything runs.
        SpecwireError: the services did not start, or the generation failed.
    """
    end_on_signals()
    _check(args)
    generation = _generation(args)
    whole = layout.make(generation, args.rounds)
    _write("--out", args.out, picture.render(layout.make(generation, args.rounds or picture.middle(whole))))
    if args.perfetto:
        _write("--perfetto", args.perfetto, json.dumps(perfetto.document(whole)))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check flags now, rather than after the generation."""
    files.check_place("--out", args.out)
    files.check_place("--perfetto", args.perfetto)
    if args.out.suffix not in ("", ".svg"):
        raise ConfigError(f"--out {args.out}: the picture is an SVG, NAME.svg")
    if args.live:
        return
    fields = (*dataclasses.fields(LiveConfig), *dataclasses.fields(SamplingParams))
    given = [field.name for field in fields if field.name in args and field.name != "max_tokens"]
    given += [name for name in ("prompt", "token_ids") if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"{flag_name(given[0])}: needs --live")
    if args.receive:
        split_address("receive", args.receive)


def _generation(args: argparse.Namespace) -> GenerationTrace:
    if args.live:
        return _live(args)
    if args.receive:
        return _received(args.receive, args.trace_id)
    found = span_files.read(args.file)
    try:
        return choose(found, args.trace_id)
    except ConfigError as error:
        raise ConfigError(f"{args.file}: {error}") from None


def _live(args: argparse.Namespace) -> GenerationTrace:
    """Run a stack that exports to this process, warm it up, generate once."""
    extras.require("specwire timeline --live", "serve")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # which logs a warning for each child
    from specwire.cli.supervisor import Stack
    from specwire.client.client import Client
    from tools.bench import prompts

    receiver = _receiver("127.0.0.1:0")
    config, params = read_config(LiveConfig, args, os.environ), sampling_params(args)
    trace_id = secrets.token_hex(16)
    with receiver:
        environ = _EXPORT_ALL | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.endpoint}
        with Stack(config, environ) as stack, Client(stack.address) as client:
            prompt = {"prompt": args.prompt, "prompt_token_ids": args.token_ids}
            if args.prompt is None and args.token_ids is None:
                built_in = prompts.built_in(client.get_model_info()[0])[0]
                prompt = {"prompt": built_in.text, "prompt_token_ids": built_in.token_ids}
            client.generate(**prompt, params=params)
            client.generate(**prompt, params=params, traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-01")
        return choose(receiver.spans, trace_id)  # services export the rest when they end


def _received(address: str, trace_id: str) -> GenerationTrace:
    """The first complete generation, or that of this trace."""

    def wanted(spans: list[RecordedSpan]) -> list[GenerationTrace]:
        return [one for one in generations(spans) if trace_id.lower() in ("", one.root.trace_id)]

    with _receiver(address) as receiver:
        print(f"waiting for a generation: OTEL_EXPORTER_OTLP_ENDPOINT={receiver.endpoint}", file=sys.stderr)
        receiver.wait(wanted)
        receiver.wait(lambda spans: any(map(is_complete, wanted(spans))), _SETTLE_S)
        found = wanted(receiver.spans)
    return next(filter(is_complete, found), found[0])


def _receiver(address: str) -> SpanReceiver:
    extras.require("receiving spans", "tracing")
    from tools.timeline.receiver import SpanReceiver

    return SpanReceiver(address)


def _write(flag: str, path: Path, text: str) -> None:
    files.write(flag, path, lambda path: path.write_text(text, encoding="utf-8"))
    print(path)
