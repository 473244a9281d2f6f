"""How soon a model service serves: in processor time, which other processes do not take."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.support.processes import ROOT

MAX_START_S = 6.0
NUM_TRIES = 4
"""Processor time grows when other processes share caches and cores: one start in time is enough."""


def start_s(module: str) -> float:
    """Processor time until it serves the embedded model, imports included."""
    command = [sys.executable, "-m", module, "--address", "127.0.0.1:0", "--num-threads", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready ")
            spent = psutil.Process(process.pid).cpu_times()
            return float(spent.user + spent.system)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("module", ["draft_service", "verify_service"])
def test_a_model_service_starts_in_time(module: str) -> None:
    tries: list[float] = []
    while len(tries) < NUM_TRIES and min(tries, default=MAX_START_S) >= MAX_START_S:
        tries.append(start_s(module))
    assert min(tries) < MAX_START_S, tries
