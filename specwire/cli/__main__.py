"""`python -m specwire.cli` is `specwire`."""

import signal
import sys


def main() -> int:
    """Import and run the command line; Ctrl-C while it is imported ends it at once, without a traceback, and
    after it has run does not change its status."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from specwire.cli import main as command_line

    signal.signal(signal.SIGINT, previous)
    try:
        return command_line.main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
