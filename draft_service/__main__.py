"""`python -m draft_service`: one draft service in the foreground."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from specwire.config import environment, extras, flags, preflight
from specwire.config import services as config
from specwire.config.parser import Parser
from specwire.engine import threads
from specwire.rpc import listening, process
from specwire.telemetry import logs


def main(argv: list[str] | None = None) -> int:
    """Parse flags and variables, load the model, serve until a signal."""
    parser = Parser(prog="specwire draft", description="Run one draft service.")
    flags.add_config_file(parser)
    flags.add_flags(parser, config.DraftCommand)
    args = parser.parse_args(argv)
    return process.run_service(lambda: _serve(args), args)


async def _serve(args: argparse.Namespace) -> None:
    settings = flags.read_config(config.DraftCommand, args, os.environ)
    logs.set_up(settings.log_level, settings.log_format, "draft")
    environment.check_environment(os.environ)
    listening.check(settings)
    extras.require("specwire draft", "serve")
    preflight.check(settings)
    process.end_at_once_by_signals(signal.SIGINT, signal.SIGTERM)
    threads.spin_briefly(os.environ)
    with process.importing():
        from draft_service.service import serving  # loads torch: after the flags were checked

    await process.run_until_signal(serving(settings))


if __name__ == "__main__":
    sys.exit(main())
