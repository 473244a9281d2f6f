"""`python -m specwire.cli` is `specwire`."""

import os
import signal
import sys


def main() -> int:
    """Import and run the command line; Ctrl-C while it is imported ends it at once, without a traceback, and
    after it has run does not change its status."""
    previous = signal.getsignal(signal.SIGINT)
    if os.getpid() == 1:  # of a container: signals without a handler are ignored
        signal.signal(signal.SIGTERM, _end)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end if os.getpid() == 1 else signal.SIG_DFL)
    from specwire.cli import main as command_line

    signal.signal(signal.SIGINT, previous)
    try:
        return command_line.main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(number: int, _: object) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
