"""`python -m benchmarks.vllm`: default flags beside vLLM's CPU build, both by OpenAI's API, in turns.

`make peers` installs vLLM in an environment of its own. All servers of a pair are up at the same time, and
those that are not asked are idle: each turn waits until vLLM's threads, which spin for 0.2 s, have stopped.

With `--remote`, vLLM has drafts of our service, too, in a process of its own on the same cores. With `--far`,
only that is measured, with outcomes prepared or not: the service is 20 ms away and has a core of its own, as
vLLM has, whose runner sleeps for 40 ms before each pass: a larger model on a GPU takes no processor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.choice import NUM_TOKENS, config_of
from benchmarks.prompts import PROMPTS
from benchmarks.report import RESULTS, Report, machine, table
from specwire import SamplingParams, embedded
from specwire.cli.process import Service
from specwire.cli.supervisor import Stack
from specwire.config.models import EMBEDDED
from tools.bench.backends import OpenAIServer
from tools.bench.metrics import RequestRecord
from tools.bench.prompts import Prompt

PYTHON = Path("build/peers/bin/python")
OURS, OFF, VLLM = "specwire", "specwire without drafts", "vLLM"
REMOTE = "vLLM with a service of ours"
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
_START_S, _END_S, MODEL = 300.0, 20.0, "model"
_NUM_KV_TOKENS = 16_384
_WARM_TURNS, _PAUSE_S = 3, 0.4
_RTT_MS = 20.0
PARAMS = {"greedy": SamplingParams(temperature=0.0), "T = 1": SamplingParams()}
SLOW_PASSES = """
import time
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

def install():
    forward = GPUModelRunner._model_forward
    def slowly(self, *args, **keywords):
        time.sleep(0.04)
        return forward(self, *args, **keywords)
    GPUModelRunner._model_forward = slowly
    shm_broadcast.sched_yield = lambda: time.sleep(0.0005)
"""
"""A plug-in of vLLM's that emulates a pass of a larger model. vLLM's loop spins while it waits for a pass, on
the core that is to run it here."""


def save_plugin(folder: Path, code: str) -> Path:
    """Where vLLM finds a general plug-in, if the folder is on its path.

    Args:
        code: of a module whose `install` vLLM calls in each of its processes.
    """
    information = folder / "adapted-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (folder / "adapted.py").write_text(code)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: adapted\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\nadapted = adapted:install\n")
    return folder


@contextlib.contextmanager
def vllm(
    target: str | Path,
    *flags: str,
    speculation: Mapping[str, Any] | None = None,
    log: Path,
    plugin: str = "",
) -> Iterator[str]:
    """vLLM's server; yields its base URL, and ends it.

    Args:
        speculation: its `--speculative-config`; None decodes plainly.
        log: what it writes.
        plugin: code of a general plug-in of its own.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--served-model-name", MODEL, "--port", str(port), "--max-model-len", "1024", *flags]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    environment = {**os.environ, **_ENVIRONMENT}
    if plugin:
        found = save_plugin(log.absolute().with_suffix(".plugin"), plugin)
        environment["PYTHONPATH"] = os.pathsep.join([str(found), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    due_s = time.monotonic() + _START_S
    while time.monotonic() < due_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start within {_START_S:g} s: see {log}")


@contextlib.asynccontextmanager
async def server(url: str, model: str) -> AsyncIterator[OpenAIServer]:
    """What requests are sent to."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:
        yield OpenAIServer(client, "/v1/completions", model, is_chat=False)


async def rate(asked: OpenAIServer, params: SamplingParams, num_streams: int, turn: int) -> float:
    """Tokens a second of so many requests at once."""
    await asyncio.sleep(_PAUSE_S)
    began_s, attempts = time.monotonic(), [RequestRecord() for _ in range(num_streams)]
    await asyncio.gather(
        *(
            asked.send(
                Prompt(text=PROMPTS[(turn + i) % len(PROMPTS)]),
                replace(params, seed=turn * num_streams + i),
                attempt,
                time.monotonic,
            )
            for i, attempt in enumerate(attempts)
        )
    )
    return sum(each.num_output_tokens for each in attempts) / (time.monotonic() - began_s)


async def measure(urls: dict[str, tuple[str, str]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens a second by point and system: medians over the turns."""
    found: dict[str, dict[str, float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(server(url, model)) for name, (url, model) in urls.items()
        }
        for kind, params in PARAMS.items():
            asked = replace(params, max_tokens=NUM_TOKENS, ignore_eos=True)
            for num_streams in args.streams:
                rates: dict[str, list[float]] = {name: [] for name in servers}
                for turn in range(_WARM_TURNS + args.turns):
                    for name, each in servers.items():
                        rates[name].append(await rate(each, asked, num_streams, turn))
                medians = {name: statistics.median(each[_WARM_TURNS:]) for name, each in rates.items()}
                found[f"{kind}, {num_streams}"] = medians
                print(kind, num_streams, {name: round(each) for name, each in medians.items()}, flush=True)
    return found


@contextlib.contextmanager
def on_core(number: int) -> Iterator[None]:
    """What is started meanwhile runs on this core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def remote(
    target: str, dtype: str, num: int, log: Path, *, is_far: bool = False, **options: str
) -> Iterator[str]:
    """vLLM with drafts of a service of ours; yields its base URL.

    Args:
        num: draft tokens of a row.
        is_far: the service is some way away, on a core of its own, and passes of vLLM are longer.
        options: of the plug-in.
    """
    with contextlib.ExitStack() as stack:

        def started(module: str, *flags: str) -> str:
            service = Service(module, [*flags, "--address", "127.0.0.1:0"])
            stack.callback(service.process.wait)
            stack.callback(service.process.kill)
            service.ready(_START_S)
            return service.address

        with on_core(0) if is_far else contextlib.nullcontext():
            address = started("draft_service", "--model", EMBEDDED, "--num-threads", "1")
            if is_far:
                address = started("specwire.cli", "proxy", "--to", address, "--rtt-ms", str(_RTT_MS))
        given = {"specwire": {"draft_address": address, "num_draft_tokens": str(num), **options}}
        flags = ["--dtype", dtype, "--additional-config", json.dumps(given)]
        speculation = {
            "method": "custom_class",
            "model": "specwire.vllm.RemoteDraft",
            "num_speculative_tokens": num,
        }
        about: dict[str, Any] = {"speculation": speculation, "log": log}
        if is_far:
            about["plugin"] = SLOW_PASSES
            flags.append("--enforce-eager")
        with on_core(1) if is_far else contextlib.nullcontext():
            url = stack.enter_context(vllm(target, *flags, **about))
        yield url


def acceptance_length(url: str) -> float:
    """Tokens of a step that had draft tokens, by vLLM's own metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()

    def total(name: str) -> float:
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total")
        )

    return 1 + total("num_accepted_tokens") / max(1.0, total("num_drafts"))


def measured(pair: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All points of a pair."""
    # As much memory as the streams need: several vLLM take 5 GB each beside it.
    config = replace(config_of(pair, "cpu"), http_address="127.0.0.1:0", num_kv_tokens=_NUM_KV_TOKENS)
    target = str(embedded.TARGET_DIR) if pair == EMBEDDED else config.target
    dtype = "float32" if pair == EMBEDDED else "bfloat16"
    with contextlib.ExitStack() as stack:
        urls = {}
        for num in (0, *args.lengths):
            own = {"method": "draft_model", "model": str(embedded.DRAFT_DIR), "num_speculative_tokens": num}
            log = Path(f"build/vllm-{num}.log")
            started = vllm(target, "--dtype", dtype, speculation=own if num else None, log=log)
            url = stack.enter_context(started)
            urls[f"{VLLM}, {num} tokens" if num else VLLM] = url, MODEL
        for num in args.remote:
            log = Path(f"build/vllm-remote-{num}.log")
            urls[f"{REMOTE}, {num} tokens"] = stack.enter_context(remote(target, dtype, num, log)), MODEL
        for name, changed in ((OURS, config), (OFF, replace(config, num_draft_tokens="0"))):
            ours = stack.enter_context(Stack(changed))
            assert ours.http is not None
            urls[name] = f"http://{ours.http.address}", Path(config.target).name
        found = asyncio.run(measure(urls, args))
        for name, (url, model) in urls.items():
            if model == MODEL and name != VLLM:
                print(pair, name, f"{acceptance_length(url):.3f} tokens a drafted step", flush=True)
        return found


def measured_far(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The embedded pair, one stream: outcomes prepared, and asked for."""
    with contextlib.ExitStack() as stack:
        urls = {}
        for num, (name, outcomes) in itertools.product(args.remote, {"prepared": "16", "asked": "0"}.items()):
            log = Path(f"build/vllm-far-{name}.log")
            target = str(embedded.TARGET_DIR)
            started = remote(target, "float32", num, log, is_far=True, num_outcomes=outcomes)
            urls[f"{name}, {num} tokens"] = stack.enter_context(started), MODEL
        return asyncio.run(measure(urls, argparse.Namespace(**{**vars(args), "streams": [1]})))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["widened", EMBEDDED], choices=["widened", EMBEDDED])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--lengths", nargs="*", type=int, default=[2, 4, 6, 8], help="of vLLM's own drafts")
    parser.add_argument("--remote", nargs="*", type=int, default=[], help="draft tokens of a service of ours")
    parser.add_argument("--far", action="store_true", help="that service 20 ms away, and nothing else")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if not PYTHON.exists():
        parser.error("vLLM is not installed: make peers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends, too
    if args.far:
        measured_far(args)
        return 0
    data = {pair: measured(pair, args) for pair in args.pairs}
    systems = [*next(iter(next(iter(data.values())).values()))]
    rows = []
    for pair, points in data.items():
        for point, rates in points.items():
            best = max(
                (name for name in rates if name.startswith(VLLM) and REMOTE not in name),
                key=rates.__getitem__,
            )
            ratio = f"{rates[OURS] / rates[best]:.2f} ({best})"
            rows.append([pair, point, *(f"{rates[name]:.0f}" for name in systems), ratio])
    head = ["pair", "sampling, streams", *systems, f"{OURS} / vLLM's best"]
    about = "Tokens/s, all streams together; medians of turns, after three that warm up."
    report = Report(
        name="vllm",
        title="Beside vLLM",
        machine=machine(),
        about=about,
        details=table(head, rows),
        data={"rates": data},
    )
    return report.finish(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
