"""A Ray instance of this machine alone, in a process of its own, which ends when whoever started it is gone.

Killed, a driver takes Ray's servers along, but the agents that those started live on, and so does the folder
that all of them write to. This process inherits whatever outlives its parent, and does nothing but wait for
the end of its standard input: a pipe, which the kernel closes however its other end dies.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from specwire.errors import ConfigError

# Nothing is kept in the object store, which has a least size.
_OBJECT_STORE_BYTES = 80 << 20
_READY, _ERROR = "ready ", "error "
_PR_SET_CHILD_SUBREAPER = 36
_START_S, _STOP_S = 120.0, 15.0
_POLL_S = 0.05


@functools.cache
def alone() -> dict[str, str]:
    """Variables that Ray reads when it is imported, by an instance and by all who connect to it.

    It tells nobody that it runs. As on machines that are never part of a cluster it is on loopback only, and
    takes orders from those alone that know a token, which is not to be kept in the user's home. Its workers,
    which do the work here, are not niced. One token a process: Ray reads it once.
    """
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",
    }


class Instance:
    """A running instance; a context manager that ends it, with every process of it.

    Args:
        num_cpus: how many it says it has; GPUs it counts itself.
    """

    def __init__(self, num_cpus: int) -> None:
        """Start it; wait with `ready`."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, "--num-cpus", str(num_cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | alone(),
            start_new_session=True,  # Ctrl-C reaches us alone, and we end it when nobody needs it any more
        )

    def ready(self, timeout_s: float = _START_S) -> str:
        """Wait for its address: for `ray.init` of processes that have the variables of `alone`.

        Raises:
            ConfigError: Ray does not start, with its own reason.
        """
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise ConfigError(f"Ray does not start: not ready within {timeout_s:g} s")
        line = self.process.stdout.readline().decode()
        if not line.startswith(_READY):
            raise ConfigError(f"Ray does not start: {line.removeprefix(_ERROR).strip() or 'it ended'}")
        return line.removeprefix(_READY).strip()

    def close(self) -> None:
        """End it, and wait until it is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> int:
    """Run the instance until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-cpus", type=int, required=True)
    args = parser.parse_args()
    _inherit_orphans()
    directory = tempfile.mkdtemp(prefix="specwire-ray-")
    try:
        return _run(args.num_cpus, directory)
    finally:
        _end_descendants()
        shutil.rmtree(directory, ignore_errors=True)


def _run(num_cpus: int, directory: str) -> int:
    import ray

    try:
        with contextlib.redirect_stdout(sys.stderr):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level="error",
                log_to_driver=False,
                _temp_dir=directory,
            )
    except Exception as error:
        print(f"{_ERROR}{next(iter(str(error).strip().splitlines()), type(error).__name__)}", flush=True)
        return 1
    with contextlib.suppress(BrokenPipeError):
        print(f"{_READY}{ray.get_runtime_context().gcs_address}", flush=True)
    sys.stdin.buffer.read()
    ray.shutdown()
    return 0


def _inherit_orphans() -> None:
    """Descendants whose parent dies become our children, instead of those of the machine's first process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_descendants() -> None:
    """End by force what is left; a process that one of them starts meanwhile is met in the next look."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """Of this process, on Linux; elsewhere Ray is left to end its own."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in path.read_text().split()]
    return found


if __name__ == "__main__":
    sys.exit(main())
