"""The command line: `specwire up | demo | generate | draft | verify | coordinator`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from specwire import config, flags
from specwire.config import ClientConfig, UpConfig
from specwire.core import Rule, SamplingParams
from specwire.errors import ConfigError, InvalidRequestError, SpecwireError
from specwire.flags import add_flags, flag_name, read_config

_SERVICES = {"draft": "draft_service", "verify": "verify_service", "coordinator": "coordinator"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 the generation failed, 2 bad flags or no start."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in _SERVICES:
        os.execv(sys.executable, [sys.executable, "-m", _SERVICES[argv[0]], *argv[1:]])
    args = _parser().parse_args(argv)
    try:
        config.check_environment(os.environ)
        return int(args.run(args))
    except SpecwireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InvalidRequestError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specwire", description="Exact speculative decoding across machines."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    up = commands.add_parser("up", help="run the three services on this machine until Ctrl-C")
    add_flags(up, UpConfig)
    up.set_defaults(run=_up)

    demo = commands.add_parser("demo", help="start everything, continue a prompt, show what happened")
    demo.add_argument(
        "prompt", nargs="?", default=None, help="text to continue (default: the start of a class)"
    )
    add_flags(demo, _DemoConfig)
    _add_sampling_flags(demo, max_tokens=192)
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="continue a prompt on a running coordinator")
    generate.add_argument("prompt", nargs="?", help="text to continue")
    generate.add_argument("--token-ids", type=_token_ids, metavar="1,2,3", help="the prompt as token ids")
    add_flags(generate, ClientConfig)
    _add_sampling_flags(generate)
    generate.set_defaults(run=_generate)

    for name in _SERVICES:
        commands.add_parser(
            name, help=f"run one {name} service; see `specwire {name} --help`", add_help=False
        )
    return parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DemoConfig(UpConfig):
    """`specwire up` on a free port."""

    address: str = flags.option(
        "127.0.0.1:0", "HOST:PORT the coordinator listens on; port 0 picks a free one"
    )


def _add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    group = parser.add_argument_group("sampling")
    for field in dataclasses.fields(SamplingParams):
        if field.name == "num_draft_tokens" and any(
            "--num-draft-tokens" in a.option_strings for a in parser._actions
        ):
            continue
        group.add_argument(
            flag_name(field.name), dest=field.name, default=argparse.SUPPRESS, **_SAMPLING_FLAGS[field.name]
        )
    parser.set_defaults(**defaults)
    group.add_argument("--json", action="store_true", help="print the completion as JSON")


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of token ids") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID=BIAS") from None


_SAMPLING_FLAGS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N", "help": "most tokens to emit"},
    "temperature": {"type": float, "metavar": "X", "help": "divides the logits; 0 is greedy"},
    "top_k": {"type": int, "metavar": "N", "help": "keep the N likeliest tokens; 0 keeps all"},
    "top_p": {"type": float, "metavar": "X", "help": "keep the smallest set with this mass"},
    "min_p": {"type": float, "metavar": "X", "help": "drop tokens less likely than X times the likeliest"},
    "repetition_penalty": {"type": float, "metavar": "X", "help": "over 1 disfavours tokens seen before"},
    "presence_penalty": {"type": float, "metavar": "X", "help": "subtracted once from tokens in the output"},
    "frequency_penalty": {"type": float, "metavar": "X", "help": "subtracted once per occurrence"},
    "logit_bias": {"type": _bias, "action": "append", "metavar": "ID=X", "help": "add X to a token's logit"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "string that ends the output; may be repeated"},
    "stop_token_ids": {"type": _token_ids, "metavar": "1,2", "help": "token ids that end the output"},
    "ignore_eos": {"action": "store_true", "help": "go on past the end-of-sequence token"},
    "seed": {"type": int, "metavar": "N", "help": "fixes all random choices"},
    "rule": {"choices": [rule.value for rule in Rule], "help": "how draft and target are reconciled"},
    "num_draft_tokens": {"type": int, "metavar": "N", "help": "guesses a round; 0 switches speculation off"},
    "logprobs": {
        "type": int,
        "metavar": "N",
        "help": "report log probabilities, and those of the N likeliest",
    },
}


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(SamplingParams) if f.name in args}
    values["logit_bias"] = dict(values.get("logit_bias", ()))
    return SamplingParams(**values)


def _up(args: argparse.Namespace) -> int:
    from specwire.supervisor import Stack

    settings = read_config(UpConfig, args, os.environ)
    signal.signal(signal.SIGTERM, _interrupt)
    with Stack(settings) as stack:
        print(f"ready {stack.address}", flush=True)
        ended = stack.wait()
        while ended is stack.draft:
            print("the draft service ended; decoding goes on without it", file=sys.stderr)
            stack.services.remove(ended)
            ended = stack.wait()
        print(f"error: {ended.module} ended with status {ended.process.returncode}", file=sys.stderr)
        return 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _demo(args: argparse.Namespace) -> int:
    from specwire import demo

    signal.signal(signal.SIGTERM, _interrupt)
    settings = read_config(_DemoConfig, args, os.environ)
    params = _sampling_params(args)
    as_json: bool = args.json
    return demo.run(settings, args.prompt, params, as_json=as_json)


def _generate(args: argparse.Namespace) -> int:
    from specwire.client import Client

    settings = read_config(ClientConfig, args, os.environ)
    params = _sampling_params(args)
    with (
        Client(settings.server, timeout_s=settings.timeout_s) as client,
        client.stream(args.prompt, params, prompt_token_ids=args.token_ids) as stream,
    ):
        for chunk in stream:
            if not args.json:
                print(chunk.text, end="", flush=True)
        completion = stream.completion
    if args.json:
        print(json.dumps(completion.to_dict(), ensure_ascii=False, indent=2))
    elif completion.text:
        print()
    else:
        print(*completion.token_ids)
    return 0


if __name__ == "__main__":
    sys.exit(main())
