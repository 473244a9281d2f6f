"""A local Ray instance in a process of its own, which ends when the process that started it ends.

If a driver is killed, Ray's servers end with it, but the agents that those started do not, and the directory
that they write to remains. This process adopts such orphans, and waits for the end of its standard input: a
pipe, which the kernel closes however the process at its other end dies.
"""

from __future__ import annotations

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

from specwire import parent
from specwire.errors import ConfigError

# The object store is not used, but has a minimum size.
_OBJECT_STORE_BYTES = 80 << 20
_READY, _ERROR = "ready ", "error "
_PR_SET_CHILD_SUBREAPER = 36
_START_S, _STOP_S = 120.0, 15.0
_POLL_S = 0.05


@functools.cache
def isolated_environ() -> dict[str, str]:
    """Environment variables that Ray reads on import, in an instance and in processes that connect to it.

    Usage statistics are off. The instance listens on loopback only, as on machines that are never part of a
    cluster, and requires a token, which is not stored in the user's home directory; there is one per process,
    since Ray reads it once. Its workers, which do the actual work, are not niced. Its control service, for
    which it waits 30 s by default, may need all of our own limit where its program is not in memory yet.
    """
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",
        "RAY_gcs_server_port_wait_time_s": f"{_START_S:.0f}",
    }


class Instance:
    """A running instance, which offers so many CPUs and the GPUs that it finds; as a context manager it ends
    the instance with all of its processes."""

    def __init__(self, num_cpus: int) -> None:
        """Start it; wait with `ready`."""
        self.process = subprocess.Popen(
            parent.python("-m", __name__, str(num_cpus)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | isolated_environ(),
            start_new_session=True,  # Ctrl-C must not reach it: `close` ends it when it is no longer needed
        )

    def ready(self) -> str:
        """Wait for its address, for `ray.init` in processes with the variables of `isolated_environ`.

        Raises:
            ConfigError: Ray does not start, with its own reason.
        """
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], _START_S)[0]:
            raise ConfigError(f"Ray does not start: not ready within {_START_S:g} s")
        line = self.process.stdout.readline().decode()
        if not line.startswith(_READY):
            raise ConfigError(f"Ray does not start: {line.removeprefix(_ERROR).strip() or 'it ended'}")
        return line.removeprefix(_READY).strip()

    def close(self) -> None:
        """End it, and wait until its process has ended."""
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
    num_cpus = int(sys.argv[1])
    if sys.platform == "linux":  # orphaned descendants become its children, instead of the machine's init's
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    directory = tempfile.mkdtemp(prefix="specwire-ray-")
    try:
        return _run(num_cpus, directory)
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
        print(f"{_ERROR}{first_line(error)}", flush=True)
        return 1
    with contextlib.suppress(BrokenPipeError):
        print(f"{_READY}{ray.get_runtime_context().gcs_address}", flush=True)
    sys.stdin.buffer.read()
    ray.shutdown()
    return 0


def _end_descendants() -> None:
    """Kill all remaining descendants, repeatedly, since they may start others meanwhile."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """Children of this process, on Linux; elsewhere Ray ends its own processes."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in path.read_text().split()]
    return found


def first_line(error: BaseException) -> str:
    """Of what an error says; its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())
