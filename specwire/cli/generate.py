"""`specwire generate`: continue a prompt on a running coordinator."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from specwire.config.client import ClientConfig
from specwire.config.parser import add_command
from specwire.config.sampling_flags import add_sampling_flags, sampling_params, token_ids
from specwire.errors import ConfigError

_STDIN = "-"


def add(commands: Any) -> None:
    about = "continue a prompt on a running coordinator"
    generate = add_command(commands, "generate", about, ClientConfig, run)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", help="text to continue; - reads it from standard input")
    prompt.add_argument("--token-ids", type=token_ids, metavar="1,2,3", help="the prompt as token ids")
    add_sampling_flags(generate)
    generate.add_argument("--json", action="store_true", help="print the completion as JSON")
    about = "print to standard error where the time went, stage by stage"
    generate.add_argument("--timing", action="store_true", help=about)


def run(settings: ClientConfig, args: argparse.Namespace) -> int:
    """Print the text as it comes, or the completion as JSON; raises SpecwireError."""
    from specwire.cli.terminal import printable, say_why_plain
    from specwire.client.client import Client

    params = sampling_params(args)
    prompt = _prompt(args.prompt)
    with (
        Client(settings.server, timeout_s=settings.timeout_s, **settings.credentials) as client,
        client.stream(prompt, params, prompt_token_ids=args.token_ids) as stream,
    ):
        for chunk in stream:
            if not args.json:
                print(printable(chunk.text) if sys.stdout.isatty() else chunk.text, end="", flush=True)
        completion = stream.completion
    if args.json:
        print(json.dumps(completion.to_dict(), ensure_ascii=False, indent=2))
    else:
        _finish(completion)
        say_why_plain(completion, params)
    if args.timing:
        print(*_timing(completion), sep="\n", file=sys.stderr)
    return 0


def _prompt(given: str | None) -> str | None:
    """The text to continue; None where it is given as token ids. ConfigError if it is empty or no text."""
    try:
        text = sys.stdin.buffer.read().decode() if given == _STDIN else given
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input is not UTF-8: {error.reason}") from None
    if text == "":
        where = " on standard input" if given == _STDIN else ""
        raise ConfigError(f"the prompt{where} is empty; give a text to continue")
    return text


def _finish(completion: Any) -> None:
    """After the streamed text: token ids where there was none, and the other texts of a beam search."""
    from specwire.cli.terminal import printable

    if completion.text:
        print()
    else:
        print(*completion.token_ids)
    for each in completion.hypotheses[1:]:
        text = printable(each.text) if sys.stdout.isatty() else each.text
        print(f"--- score {each.score:.4f}", text or " ".join(map(str, each.token_ids)), sep="\n")


def _timing(completion: Any) -> list[str]:
    """Stages that took time, their sum, and the speed."""
    timing, num_tokens = completion.timing, completion.usage.completion_tokens
    stages = [(stage.replace("_", " "), spent_ms) for stage, spent_ms in timing.stages.items() if spent_ms]
    rows = [*stages, ("sum", timing.total_ms), ("first token after", timing.time_to_first_token_ms)]
    lines = [f"{name:>19}  {spent_ms:9.1f} ms" for name, spent_ms in rows]
    speed = 1e3 * num_tokens / timing.total_ms if timing.total_ms else 0.0
    return [*lines, f"{'tokens/s':>19}  {speed:9.1f}     {num_tokens} tokens"]
