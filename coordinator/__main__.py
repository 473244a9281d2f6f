"""`python -m coordinator`: one coordinator in the foreground."""

from __future__ import annotations

import argparse
import os
import sys

from specwire.cli import replicas
from specwire.config import environment, extras, flags, preflight
from specwire.config import services as config
from specwire.config.parser import Parser
from specwire.rpc import listening, process
from specwire.telemetry import logs


def main(argv: list[str] | None = None) -> int:
    """Parse flags and variables, connect to the model services, serve until a signal."""
    parser = Parser(prog="specwire coordinator", description="Run one coordinator.")
    flags.add_config_file(parser)
    flags.add_flags(parser, config.CoordinatorCommand)
    args = parser.parse_args(argv)
    return process.run_service(lambda: _serve(args), args)


async def _serve(args: argparse.Namespace) -> None:
    settings = flags.read_config(config.CoordinatorCommand, args, os.environ)
    logs.set_up(settings.log_level, settings.log_format, "coordinator")
    environment.check_environment(os.environ)
    listening.check(settings)
    extras.require("specwire coordinator", "coordinator")
    is_worker = replicas.is_worker()
    if not is_worker:
        preflight.check(settings)
    if settings.workers > 1 and not is_worker:
        await process.run_until_signal(replicas.workers(["coordinator"], settings))
        return
    from coordinator.service import serving  # after the flags were checked

    await process.run_until_signal(serving(settings), shows_life=is_worker)


if __name__ == "__main__":
    sys.exit(main())
