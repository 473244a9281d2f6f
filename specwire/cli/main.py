"""The command line: `specwire up | demo | generate | http | bench | ...`, and the services by name."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from specwire import parent
from specwire.cli import generate, kept, serve
from specwire.cli.process import end_on_signals
from specwire.cli.supervisor import Stack
from specwire.config import extras, preflight
from specwire.config.client import ClientConfig, HttpConfig
from specwire.config.environment import check_environment
from specwire.config.flags import as_given
from specwire.config.parser import Parser, add_command
from specwire.config.sampling_flags import add_sampling_flags, sampling_params
from specwire.config.serve import ServeConfig
from specwire.config.stack import UpConfig
from specwire.errors import ConfigError, InvalidRequestError, SpecwireError, UnauthenticatedError
from specwire.telemetry import logs

log = logging.getLogger(__name__)

_SERVICES = {"draft": "draft_service", "verify": "verify_service", "coordinator": "coordinator"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        The exit status: 0 done, 1 the generation failed or a service was lost, 2 invalid flags, variables or
        models, 130 interrupted by Ctrl-C. SIGTERM is the normal end of what serves: 0.
    """
    _open_missing()
    parent.end_with_it()
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in _SERVICES:
        if os.getpid() == 1:  # without its handlers signals would be ignored; the service unblocks them
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        os.execv(sys.executable, parent.python("-m", _SERVICES[argv[0]], *argv[1:]))
    args = argparse.Namespace()
    try:
        _parser().parse_args(argv, args)
        if argv[0] not in ("serve", "up", "http"):  # whose log has a form of its own
            check_environment(os.environ)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except SpecwireError as error:
        hint = "; SPECWIRE_TOKEN or --token-file gives one" if isinstance(error, UnauthenticatedError) else ""
        logs.report(f"{as_given(error, args)}{hint}")
        return 2 if isinstance(error, ConfigError | InvalidRequestError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `specwire generate ... | head`
        _drop_output()
        return 141
    except OSError as error:
        if _takes_output():
            raise
        _drop_output()
        logs.report(f"standard output: cannot be written ({error.strerror})")
        return 1


def _open_missing() -> None:
    """A standard stream that was closed is an empty file: no other file takes its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _takes_output() -> bool:
    """Whether standard output can be written, which a full one cannot."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _drop_output() -> None:
    """So that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_EXAMPLES = """\
examples:
  specwire demo                                         everything in one go, with a small built-in pair
  specwire serve DIR --draft DIR                        serve a model with a draft over OpenAI's API
  specwire up --target DIR --draft DIR                  its three services on this machine, over gRPC
  specwire chat                                         chat with a running server
  specwire generate "def f(x):" --temperature 0         continue a prompt on it; - reads standard input
  specwire bench serve --rate 4                         measure a running server under load
  specwire proxy --to 127.0.0.1:7071 --rtt-ms 20        emulate a network in front of a service
  specwire token alice --tokens tokens.txt              make a bearer token for a client
  specwire timeline --live                              draw a timeline of one generation
  specwire train-heads --text FILE --out DIR            make heads with which a target drafts for itself
  specwire train-eagle3 --text FILE --out DIR           make an EAGLE-3 with which a target drafts for itself
  specwire search-layers --text FILE                    find layers without which a target drafts for itself
  specwire drafts                                       what drafts there are, and what they have brought
  specwire tune --text FILE                             how a pair would be drafted here, and why
  specwire status                                       what a server does, and whether texts can be repeated

Every flag that names a variable can be set through it; the flag wins. Services, serve, up, demo and http read
flags from a YAML file too (--config), over which both win.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="specwire",
        description="Exact speculative decoding across machines.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    try:
        version = metadata.version("specwire")
    except metadata.PackageNotFoundError:
        version = "from a source tree"
    parser.add_argument("--version", action="version", version=f"specwire {version}")
    from tools import commands as tools  # not before the command line is read: no service needs them

    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve.add(commands, _serve)
    about = "run the three services on this machine until Ctrl-C"
    add_command(commands, "up", about, UpConfig, _up, has_file=True)
    tools.add_demo(commands)
    about = "say whether a service is healthy; status 0 if it is"
    health = add_command(commands, "health", about, ClientConfig, _health)
    health.add_argument("--service", default="", metavar="NAME", help="full name (default: all it serves)")
    _add_chat(commands)
    generate.add(commands)
    tools.add_bench(commands)
    tools.add_proxy(commands)
    _add_token(commands)
    about = "serve OpenAI's API and a page in front of a coordinator"
    add_command(commands, "http", about, HttpConfig, _http, has_file=True)
    tools.add_training(commands)
    about = "list the kinds of drafts, what they need, and what they have brought on a running coordinator"
    add_command(commands, "drafts", about, ClientConfig, _drafts)
    tools.add_tune(commands)
    about = "say what a running coordinator serves and does, and whether its texts can be repeated"
    add_command(commands, "status", about, ClientConfig, _status)
    tools.add_timeline(commands)
    for name in _SERVICES:
        commands.add_parser(name, help=f"run one {name} service", add_help=False)
    return parser


def _add_chat(commands: Any) -> None:
    about = "chat with the model of a running coordinator, in colours by the fate of each token"
    chat = add_command(commands, "chat", about, ClientConfig, _chat)
    chat.add_argument("--system", default="", metavar="TEXT", help="what the model is told before the chat")
    add_sampling_flags(chat, max_tokens=512)


def _add_token(commands: Any) -> None:
    about = "make a bearer token; services store its hash"
    token = commands.add_parser("token", help=about, description=about[0].upper() + about[1:] + ".")
    token.add_argument("name", help="of its principal; tokens of one name share the limits")
    token.add_argument("--tokens", metavar="FILE", help="add the hash to this file (default: print its line)")
    token.add_argument("--expires", metavar="DATE", help="refuse it from 2027-01-31 or 2027-01-31T18:00Z on")
    token.add_argument("--max-running", type=int, metavar="N", help="generations of that name at a time")
    token.add_argument("--max-waiting", type=int, metavar="N", help="generations of that name that wait")
    token.add_argument("--max-tokens", type=int, metavar="N", help="tokens that one generation may ask for")
    token.set_defaults(run=_token)


def _up(settings: UpConfig, _: argparse.Namespace) -> int:
    extras.require("specwire up", "serve")
    if settings.http_address:
        extras.require("--http-address", "http")
    return _run_stack(settings, "up")


def _serve(settings: ServeConfig, _: argparse.Namespace) -> int:
    extras.require("specwire serve", "serve")
    extras.require("specwire serve", "http")
    return _run_stack(settings, "serve", serve.about_draft(settings))


def _run_stack(settings: UpConfig, name: str, about: str = "") -> int:
    logs.set_up(settings.log_level, settings.log_format, name)
    check_environment(os.environ)
    end_on_signals(terminated=0)
    with Stack(settings) as stack:
        print(f"ready {stack.address}", flush=True)
        if stack.http:
            print(f"page http://{stack.http.address}/", flush=True)
        if about:
            print(about, flush=True)
        stack.keep()


def _health(settings: ClientConfig, args: argparse.Namespace) -> int:
    from specwire.cli import status

    found = asyncio.run(status.health(settings, args.service))
    print(found)
    return 0 if found == status.SERVING else 1


def _chat(settings: ClientConfig, args: argparse.Namespace) -> int:
    from specwire.cli import chat

    return chat.run(settings, args, sampling_params(args))


def _token(args: argparse.Namespace) -> int:
    from specwire.config.security import bearer as tokens

    limits = {name: getattr(args, name) for name in ("max_running", "max_waiting", "max_tokens", "expires")}
    token, line = tokens.make_token(args.name, **limits)
    if args.tokens:
        tokens.add_line(args.tokens, line)
        print(token)
    else:
        print(f"token, shown this once: {token}\nline for the tokens file: {line}")
    return 0


def _drafts(settings: ClientConfig, _: argparse.Namespace) -> int:
    from specwire.cli import drafts

    print(drafts.show(settings, colour=sys.stdout.isatty()))
    return 0


def _status(settings: ClientConfig, _: argparse.Namespace) -> int:
    from specwire.cli import status

    print(status.show(settings))
    return 0


def _http(settings: HttpConfig, _: argparse.Namespace) -> int:
    from specwire.rpc import process

    extras.require("specwire http", "http")
    logs.set_up(settings.log_level, settings.log_format, "http")
    check_environment(os.environ)
    is_worker = kept.is_worker()
    if not is_worker:
        preflight.check(settings)
        if settings.workers > 1:
            kept.run_workers(["specwire.cli", "http"], settings)
    from specwire.http import server

    asyncio.run(process.run_until_signal(server.serving(settings), shows_life=is_worker))
    return 0
