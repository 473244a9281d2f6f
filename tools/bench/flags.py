"""The flags of `specwire bench serve`, with vLLM's names for them beside ours, and of `spec-bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from specwire.config.parser import StoreNamed
from tools.bench.metrics import OBJECTIVES

SPECWIRE, OPENAI, OPENAI_CHAT = "specwire", "openai", "openai-chat"
RANDOM, SHAREGPT, CUSTOM = "random", "sharegpt", "custom"


def add(serve: argparse.ArgumentParser) -> None:
    """Add all but those of the connection and of sampling."""
    _add_server(serve)
    _add_load(serve)
    _add_dataset(serve)
    _add_output(serve)


def add_spec_bench(asked: argparse.ArgumentParser) -> None:
    """Add those of `specwire bench spec-bench`, likewise."""
    group = asked.add_argument_group("questions")
    about = "JSON lines with question_id, category and turns"
    group.add_argument("--questions", type=Path, required=True, metavar="FILE", help=about)
    about = "where METHOD.jsonl and spec-bench.md are written (default spec-bench)"
    group.add_argument("--output", type=Path, default=Path("spec-bench"), metavar="DIR", help=about)
    about = "plain, auto, model, tree, ... (default: plain and all that the server has)"
    group.add_argument("--methods", nargs="+", default=[], metavar="NAME", help=about)


def _add_server(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=(SPECWIRE, OPENAI, OPENAI_CHAT),
        default=SPECWIRE,
        help="a coordinator at --server, or OpenAI's API at --base-url (default specwire)",
    )
    group.add_argument(
        "--base-url", metavar="URL", help="of OpenAI's API, without /v1; its key is OPENAI_API_KEY"
    )
    group.add_argument("--endpoint", metavar="PATH", help="default /v1/completions or /v1/chat/completions")
    group.add_argument("--model", default="", metavar="NAME", help="default: the first one the server names")


def _add_load(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("load")
    group.add_argument(
        *("--rate", "--request-rate"),
        type=_positive,
        metavar="R",
        help="requests per second; inf: all at once, which is the default without --concurrency",
    )
    group.add_argument(
        *("--concurrency", "--max-concurrency"),
        type=_count,
        metavar="C",
        help="requests that run at a time; with --rate, at most so many",
    )
    group.add_argument(
        *("--num-requests", "--num-prompts"),
        type=_count,
        default=100,
        metavar="N",
        help="in all (default 100)",
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
        help="of arrival times and random prompts; request i samples with seed + i (default 0)",
    )


def _add_dataset(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name",
        choices=(RANDOM, SHAREGPT, CUSTOM),
        help="random tokens, first turns of ShareGPT's conversations, or the prompts of a file "
        "(default: that of --prompts, else a few beginnings of programs)",
    )
    group.add_argument(
        *("--prompts", "--dataset-path"),
        dest="prompts",
        type=Path,
        action=StoreNamed,
        metavar="FILE",
        help="a prompt a line, or JSON lines with prompt or prompt_token_ids, and max_tokens if "
        "wanted; taken in turn; of sharegpt its JSON",
    )
    group.add_argument(
        *("--random-input-len", "--input-len"),
        dest="random_input_len",
        type=_count,
        default=1024,
        metavar="N",
        help="tokens of a random prompt (default 1024)",
    )
    group.add_argument(
        *("--random-output-len", "--output-len"),
        dest="random_output_len",
        type=_count,
        default=128,
        metavar="N",
        help="most tokens of its output; all of them with --ignore-eos (default 128)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="DIR_OR_ID",
        help="makes text of random tokens, for OpenAI's API (default --model)",
    )


def _add_output(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("result")
    group.add_argument(
        "--goodput",
        type=_objective,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives, in ms: ttft_ms, tpot_ms, e2el_ms; requests that meet all of them are counted",
    )
    group.add_argument(
        *("--json", "--result-filename"),
        dest="json",
        type=Path,
        metavar="FILE",
        help="write settings and figures as JSON",
    )
    group.add_argument("--save-result", action="store_true", help="as --json, to bench-BACKEND-DATE.json")
    group.add_argument("--save-detailed", action="store_true", help="add lists by request to the JSON")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw latencies and throughput (.png, .svg)")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not over 0")
    return value


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
