"""The command line: `specwire up | demo | generate | draft | verify | coordinator`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from specwire import config, flags
from specwire.config import ClientConfig, UpConfig
from specwire.core import Rule, SamplingParams
from specwire.errors import ConfigError, InvalidRequestError, SpecwireError
from specwire.flags import add_flags, flag_name, read_config
from specwire.supervisor import Stack

_SERVICES = {"draft": "draft_service", "verify": "verify_service", "coordinator": "coordinator"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        The exit status: 0 done, 1 the generation failed or a service went away, 2 flags, variables or
        models that cannot be used, 130 interrupted. Ctrl-C is the normal end of `up`: 0.
    """
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
    except BrokenPipeError:  # `specwire generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor shall the flush at exit fail
        return 141


_EXAMPLES = """\
examples:
  specwire demo                                         everything in one go, with a small built-in pair
  specwire up --target DIR --draft DIR                  serve two models on this machine
  specwire generate "def f(x):" --temperature 0         continue a prompt on a running server

Every flag that names a variable can be set through it; the flag wins.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specwire",
        description="Exact speculative decoding across machines.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"specwire {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_up(commands)
    _add_demo(commands)
    _add_generate(commands)
    for name in _SERVICES:
        commands.add_parser(name, help=f"run one {name} service", add_help=False)
    return parser


def _version() -> str:
    try:
        return metadata.version("specwire")
    except metadata.PackageNotFoundError:
        return "from a source tree"


def _add_command(commands: Any, name: str, about: str, config: type[Any]) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about[0].upper() + about[1:] + ".", allow_abbrev=False
    )
    add_flags(command, config)
    return command


def _add_up(commands: Any) -> None:
    about = "run the three services on this machine until Ctrl-C"
    _add_command(commands, "up", about, UpConfig).set_defaults(run=_up)


def _add_demo(commands: Any) -> None:
    about = "start everything, continue a prompt, show what happened"
    demo = _add_command(commands, "demo", about, _DemoConfig)
    demo.add_argument("prompt", nargs="?", help="text to continue (default: the start of a class)")
    _add_sampling_flags(demo, max_tokens=192)
    demo.set_defaults(run=_demo)


def _add_generate(commands: Any) -> None:
    about = "continue a prompt on a running coordinator"
    generate = _add_command(commands, "generate", about, ClientConfig)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", help="text to continue")
    prompt.add_argument("--token-ids", type=_token_ids, metavar="1,2,3", help="the prompt as token ids")
    _add_sampling_flags(generate)
    generate.set_defaults(run=_generate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DemoConfig(UpConfig):
    """`specwire up` on a free port."""

    address: str = flags.option(
        "127.0.0.1:0", "HOST:PORT the coordinator listens on; port 0 picks a free one"
    )


def _add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """One flag for each of `SamplingParams`, unless the command's config has one of that name."""
    group = parser.add_argument_group("sampling")
    taken = {action.dest for action in parser._actions}
    for field in dataclasses.fields(SamplingParams):
        if field.name not in taken:
            kwargs = _SAMPLING_FLAGS[field.name]
            default = defaults.get(field.name, field.default)
            if not isinstance(default, bool) and isinstance(default, int | float | str):
                kwargs = kwargs | {"help": f"{kwargs['help']} (default {default})"}
            group.add_argument(flag_name(field.name), default=argparse.SUPPRESS, **kwargs)
    parser.set_defaults(**defaults)
    parser.add_argument("--json", action="store_true", help="print the completion as JSON")


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
    settings = read_config(UpConfig, args, os.environ)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Stack(settings) as stack:
            print(f"ready {stack.address}", flush=True)
            return _supervise(stack)
    except KeyboardInterrupt:
        return 0


def _supervise(stack: Stack) -> int:
    """Until a service ends that the others cannot do without."""
    ended = stack.wait()
    if ended is stack.draft:
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
    from specwire.demo import printable

    settings = read_config(ClientConfig, args, os.environ)
    params = _sampling_params(args)
    with (
        Client(settings.server, timeout_s=settings.timeout_s) as client,
        client.stream(args.prompt, params, prompt_token_ids=args.token_ids) as stream,
    ):
        for chunk in stream:
            if not args.json:
                print(printable(chunk.text) if sys.stdout.isatty() else chunk.text, end="", flush=True)
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
