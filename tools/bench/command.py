"""The command lines of `specwire bench serve` and `specwire bench spec-bench`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specwire.config import extras, parser
from specwire.config.client import ClientConfig
from specwire.config.sampling_flags import add_sampling_flags, sampling_params
from specwire.core import SamplingParams
from specwire.errors import ConfigError
from tools import files
from tools.bench import flags
from tools.bench.metrics import RequestRecord, Summary, summarize

_ABOUT = "send a load of requests to a running server and measure latency and throughput"
_EXAMPLES = """\
examples:
  specwire bench serve --rate 4 --num-requests 200            Poisson arrivals, 4 a second
  specwire bench serve --rate inf --num-requests 64           all at once
  specwire bench serve --concurrency 8 --json out.json        8 at a time
  specwire bench serve --backend openai --base-url http://127.0.0.1:8000 --num-prompts 64
                                                              any server with OpenAI's API
  specwire bench serve --rate 4 --goodput ttft_ms:200 tpot_ms:50

Figures and flags have the names that vLLM's serving benchmark gives them; times are the client's.
Exit status: 0 all requests completed, 1 some failed, 130 interrupted (prints the results so far).
"""

_NOT_OF_SPEC_BENCH = (
    *("draft", "max_depth", "cache_salt", "num_beams", "length_penalty", "early_stopping"),
    "num_return_sequences",
)
"""What its methods are, and what has no passes of its own."""


def add_command(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure a running server")
    subcommands = bench.add_subparsers(metavar="WHAT", required=True)
    usage = "%(prog)s [FLAG ...]"
    serve = parser.add_command(subcommands, "serve", _ABOUT, ClientConfig, run, usage=usage, epilog=_EXAMPLES)
    flags.add(serve)
    add_sampling_flags(serve, omit=("seed",), max_tokens=128)
    about = "ask a running server Spec-Bench's questions with each kind of draft, one at a time"
    asked = parser.add_command(subcommands, "spec-bench", about, ClientConfig, _ask, usage=usage)
    flags.add_spec_bench(asked)
    add_sampling_flags(asked, omit=_NOT_OF_SPEC_BENCH, max_tokens=1024, temperature=0)


def _ask(config: ClientConfig, args: argparse.Namespace) -> int:
    from tools.bench import spec_bench

    return spec_bench.run(config, args)


def run(config: ClientConfig, args: argparse.Namespace) -> int:
    """Measure as the flags say, and report.

    Raises:
        ConfigError: a file that cannot be used; found before anything is sent.
        SpecwireError: the server cannot be reached.
    """
    params = sampling_params(args)
    if args.save_result and args.json is None:
        args.json = Path(f"bench-{args.backend}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
    _check_outputs(args)
    session = _Session(args, config, params)
    interrupted = False
    try:
        asyncio.run(session.measure())
    except KeyboardInterrupt:
        interrupted = True
    summary = session.report(interrupted)
    return 130 if interrupted else int(summary.failed > 0)


def _check_outputs(args: argparse.Namespace) -> None:
    files.check_place("--json", args.json)
    files.check_place("--plot", args.plot)
    if args.save_detailed and args.json is None:
        raise ConfigError("--save-detailed: needs --json FILE")
    if args.plot is None:
        return
    extras.require("--plot", "bench")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if args.plot.suffix.removeprefix(".") not in known:
        raise ConfigError(f"--plot {args.plot}: does not end in one of {', '.join(known)}")


class _Session:
    """One run of the command, which can report a partial measurement after an interruption."""

    def __init__(self, args: argparse.Namespace, config: ClientConfig, params: SamplingParams) -> None:
        from tools.bench import serve, targets

        self._args = args
        self._params = params
        self._target = targets.BenchTarget(args, config, params)
        self._load = serve.OfferedLoad(
            num_requests=args.num_requests,
            rate=math.inf if args.rate is None and args.concurrency is None else args.rate,
            concurrency=args.concurrency,
            burstiness=args.burstiness,
            retries=args.retries,
            seed=args.seed,
        )
        self._measurement: serve.Measurement | None = None

    async def measure(self) -> None:
        from tools.bench import report, serve

        args = self._args
        async with self._target.opened() as backend:
            shown = report.progress(self._load.num_requests, disabled=args.disable_tqdm)
            with shown as on_record:
                measurement = serve.Measurement(
                    backend, self._target.prompts, self._params, self._load, on_record=on_record
                )
                await measurement.warm_up(args.num_warmups)
                self._measurement = measurement
                await measurement.run()

    def report(self, interrupted: bool) -> Summary:
        from tools.bench import report

        args, measurement = self._args, self._measurement
        records: Sequence[RequestRecord] = measurement.records if measurement else []
        summary = summarize(records, measurement.duration_s if measurement else 0.0, dict(args.goodput))
        if interrupted:
            print(f"interrupted after {len(records)} of {args.num_requests} requests", file=sys.stderr)
        try:
            self._write(summary, records, interrupted)
        finally:  # where one of them is full, the others have it
            print(report.table(summary, records))
        return summary

    def _write(self, summary: Summary, records: Sequence[RequestRecord], interrupted: bool) -> None:
        """The files that are asked for."""
        from tools.bench import report

        args = self._args
        if args.json:
            settings = self._settings() | {"interrupted": interrupted}
            found = report.result(settings, summary, records, detailed=args.save_detailed)
            text = json.dumps(found, ensure_ascii=False, indent=2) + "\n"
            files.write("--json", args.json, lambda path: path.write_text(text, encoding="utf-8"))
        if args.plot:
            rate = self._load.rate
            how = f"{args.concurrency} at a time" if rate is None else f"{rate:g} requests/s"
            title = f"{self._target.model_id}: {args.num_requests} requests, {how}"
            files.write("--plot", args.plot, lambda path: report.plot(path, summary, records, title))

    def _settings(self) -> dict[str, Any]:
        """The settings, so that the file is self-contained."""
        args, target, rate = self._args, self._target, self._load.rate
        names = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "seed"]
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "backend": args.backend,
            "server": target.address,
            "model_id": target.model_id,
            "draft_model_id": target.draft_model_id,
            "dataset_name": args.dataset_name or "",
            "num_prompts": args.num_requests,
            "request_rate": "inf" if rate is not None and math.isinf(rate) else rate,
            "burstiness": "inf" if math.isinf(args.burstiness) else args.burstiness,
            "max_concurrency": args.concurrency,
            "retries": args.retries,
            "seed": args.seed,
            "goodput_ms": {name: "inf" if math.isinf(ms) else ms for name, ms in args.goodput},
            "sampling": {name: getattr(self._params, name) for name in names},  # the seed differs by request
        }
