"""The command line of `specwire bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specwire.cli.bench.metrics import OBJECTIVES, RequestRecord, Summary, summarize
from specwire.config import extras
from specwire.config.client import ClientConfig
from specwire.config.flags import add_flags, read_config
from specwire.config.sampling_flags import add_sampling_flags, sampling_params
from specwire.core import ModelInfo, SamplingParams
from specwire.errors import ConfigError

_ABOUT = "send a load of requests to a running coordinator and measure latency and throughput"
_EXAMPLES = """\
examples:
  specwire bench serve --rate 4 --num-requests 200            Poisson arrivals, 4 a second
  specwire bench serve --rate inf --num-requests 64           all at once
  specwire bench serve --concurrency 8 --json out.json        8 at a time
  specwire bench serve --rate 4 --goodput ttft_ms:200 tpot_ms:50

Names and definitions of the figures are those of vLLM's serving benchmark; times are the client's.
Exit status: 0 all requests completed, 1 some failed, 130 interrupted (prints the results so far).
"""


def add_command(commands: Any) -> None:
    """Add `bench` with its subcommand `serve` to the parser's commands."""
    bench = commands.add_parser("bench", help="measure a running server under load", allow_abbrev=False)
    subcommands = bench.add_subparsers(metavar="WHAT", required=True)
    serve: argparse.ArgumentParser = subcommands.add_parser(
        "serve",
        help=_ABOUT,
        description=_ABOUT[0].upper() + _ABOUT[1:] + ".",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(serve, ClientConfig)
    _add_load_flags(serve)
    _add_output_flags(serve)
    add_sampling_flags(serve, omit=("seed",), max_tokens=128)
    serve.set_defaults(run=run)


def _add_load_flags(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("load")
    loop = group.add_mutually_exclusive_group(required=True)
    loop.add_argument("--rate", type=_positive, metavar="R", help="requests per second; inf: all at once")
    loop.add_argument("--concurrency", type=_count, metavar="C", help="requests that run at a time")
    group.add_argument("--num-requests", type=_count, default=100, metavar="N", help="in all (default 100)")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt a line, or JSON lines with prompt or prompt_token_ids, and max_tokens if "
        "wanted; taken in turn (default: a few beginnings of programs)",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="X",
        help="gamma shape of the times between requests: 1 Poisson, less in bursts, inf even (default 1.0)",
    )
    group.add_argument(
        "--retries",
        type=_count_or_none,
        default=0,
        metavar="N",
        help="send a refused request again, up to N times, when the server says (default 0)",
    )
    group.add_argument(
        "--num-warmups",
        type=_count_or_none,
        default=1,
        metavar="N",
        help="requests sent before, not measured (default 1)",
    )
    group.add_argument(
        "--seed",
        type=_count_or_none,
        default=0,
        metavar="N",
        help="of the arrival times; request i samples with seed + i (default 0)",
    )


def _add_output_flags(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("result")
    group.add_argument(
        "--goodput",
        type=_objective,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives, in ms: ttft_ms, tpot_ms, e2el_ms; requests that meet all of them are counted",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write settings and figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="add lists by request to the JSON")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw latencies and throughput (.png, .svg)")


def _positive(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not over 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _count_or_none(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _count(text: str) -> int:
    value = _count_or_none(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _objective(text: str) -> tuple[str, float]:
    """`ttft_ms:200`, or `ttft:200` as vLLM writes it."""
    name, _, limit = text.partition(":")
    name = name.removesuffix("_ms")
    if name not in OBJECTIVES:
        known = ", ".join(f"{known}_ms" for known in OBJECTIVES)
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MILLISECONDS with a name of {known}")
    return name, _positive(limit)


def run(args: argparse.Namespace) -> int:
    """Measure as the flags say, and report.

    Returns:
        0 all requests completed, 1 some failed, 130 interrupted.

    Raises:
        ConfigError: a file that cannot be used; found before anything is sent.
        SpecwireError: the server cannot be reached.
    """
    config = read_config(ClientConfig, args, os.environ)
    params = sampling_params(args)
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
    """Now, rather than after the measurement."""
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"{flag} {path}: cannot be written")
    if args.save_detailed and args.json is None:
        raise ConfigError("--save-detailed: needs --json FILE")
    if args.plot is not None:
        _check_plot(args.plot)


def _check_plot(path: Path) -> None:
    extras.require("--plot", "bench")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"--plot {path}: does not end in one of {', '.join(known)}")


class _Session:
    """One run of the command, which can report a partial measurement after an interruption."""

    def __init__(self, args: argparse.Namespace, config: ClientConfig, params: SamplingParams) -> None:
        from specwire.cli.bench import prompts, serve

        self._args = args
        self._config = config
        self._params = params
        self._prompts = prompts.read(args.prompts) if args.prompts else None
        self._load = serve.OfferedLoad(
            num_requests=args.num_requests,
            rate=args.rate,
            concurrency=args.concurrency,
            burstiness=args.burstiness,
            retries=args.retries,
            seed=args.seed,
        )
        self._models: tuple[ModelInfo, ModelInfo | None] | None = None
        self._measurement: serve.Measurement | None = None

    async def measure(self) -> None:
        """Ask for the models, warm up, send the load."""
        from specwire.cli.bench import prompts, report, serve
        from specwire.client.client import AsyncClient

        config, args = self._config, self._args
        credentials = config.credentials
        async with AsyncClient(config.server, timeout_s=config.timeout_s, **credentials) as client:
            self._models = await client.get_model_info()
            texts = self._prompts or prompts.built_in(self._models[0])
            progress = report.ProgressBar(sys.stderr, self._load.num_requests)
            measurement = serve.Measurement(
                client, texts, self._params, self._load, on_record=progress.update
            )
            try:
                await measurement.warm_up(args.num_warmups)
                self._measurement = measurement
                await measurement.run()
            finally:
                progress.close()

    def report(self, interrupted: bool) -> Summary:
        """Print the table, write the files."""
        from specwire.cli.bench import report

        args, measurement = self._args, self._measurement
        records: Sequence[RequestRecord] = measurement.records if measurement else []
        summary = summarize(records, measurement.duration_s if measurement else 0.0, dict(args.goodput))
        if interrupted:
            print(f"interrupted after {len(records)} of {args.num_requests} requests", file=sys.stderr)
        print(report.table(summary, records))
        if args.json:
            settings = self._settings() | {"interrupted": interrupted}
            found = report.result(settings, summary, records, detailed=args.save_detailed)
            text = json.dumps(found, ensure_ascii=False, indent=2) + "\n"
            _written("--json", args.json, lambda path: path.write_text(text, encoding="utf-8"))
        if args.plot:
            title = self._title()
            _written("--plot", args.plot, lambda path: report.plot(path, summary, records, title))
        return summary

    def _settings(self) -> dict[str, Any]:
        """The settings, so that the file is self-contained."""
        args, (target, draft) = self._args, self._models or (None, None)
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "backend": "specwire",
            "server": self._config.server,
            "model_id": target.name if target else "",
            "draft_model_id": draft.name if draft else "",
            "num_prompts": args.num_requests,
            "request_rate": "inf" if args.rate is not None and math.isinf(args.rate) else args.rate,
            "burstiness": "inf" if math.isinf(args.burstiness) else args.burstiness,
            "max_concurrency": args.concurrency,
            "retries": args.retries,
            "seed": args.seed,
            "goodput_ms": dict(args.goodput),
            "sampling": _sampling(self._params),
        }

    def _title(self) -> str:
        args = self._args
        how = f"{args.concurrency} at a time" if args.rate is None else f"{args.rate:g} requests/s"
        name = self._models[0].name if self._models else ""
        return f"{name}: {args.num_requests} requests, {how}"


def _sampling(params: SamplingParams) -> Mapping[str, Any]:
    """The parameters without the seed, which differs by request."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: value for name, value in values.items() if name != "seed"}


def _written(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror})") from None
