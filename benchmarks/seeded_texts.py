"""`python -m benchmarks.seeded_texts`: whether a seed fixes the text of a bfloat16 target on two ranks.

Every text is written twice by real processes: plainly and undisturbed, 8 at a time and some of them alone,
and then 16 at a time, drafted or not, while a rank is killed, then one of two verify services, then one of
two coordinators. With `--batch-invariant`, and as a control without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.ranks import NUM_RANKS
from benchmarks.report import RESULTS, Bar, Report, machine, table
from specwire import AsyncClient, Rule, SamplingParams, embedded
from specwire.cli.process import Service

NUM_STREAMS = 16
_NUM_PLAIN_STREAMS = 8
_NUM_ALONE = 8
_NUM_REPLICAS = 2
_DRAFT_LENGTHS = (None, 0, 2, 4, 7)  # None: the server chooses
RANK, VERIFY, COORDINATOR = VICTIMS = ("a rank", "a verify service", "a coordinator")
"""Killed in this order, at equal distances."""
_START_S = 240.0
_POLL_S = 0.1
_LOCAL = ["--address", "127.0.0.1:0"]
_MODEL = [*_LOCAL, "--dtype", "bfloat16", "--num-threads", "1", "--num-kv-tokens", "16384"]


class Text(NamedTuple):
    """Its tokens, and whether the completion says that it can be repeated."""

    token_ids: tuple[int, ...]
    is_promised: bool


@dataclass
class Found:
    """Of one run.

    Attributes:
        num_texts: compared.
        num_differing: of these, from the same request, plain and undisturbed.
        num_promised: of these, said to be `reproducible`.
        killed: in order.
    """

    num_texts: int = 0
    num_differing: int = 0
    num_promised: int = 0
    killed: list[str] = field(default_factory=list)

    def add(self, text: Text, expected: Text) -> None:
        """Compare a text."""
        self.num_texts += 1
        self.num_differing += text.token_ids != expected.token_ids
        self.num_promised += text.is_promised


class Processes:
    """Two verify services of two ranks each, a draft service, and two coordinators."""

    def __init__(self, stack: contextlib.ExitStack, target: str, draft: str, flags: Sequence[str]) -> None:
        self._stack = stack
        groups = ["--replicas", str(_NUM_REPLICAS), "--tensor-parallel-size", str(NUM_RANKS)]
        verify = self._start("verify_service", ["--model", target, *_MODEL, *groups, *flags])
        drafting = self._start("draft_service", ["--model", draft, *_MODEL])
        peers = ["--verify-address", verify.ready(_START_S), "--draft-address", drafting.ready(_START_S)]
        self._coordinators = [self._start("coordinator", [*_LOCAL, *peers]) for _ in range(2)]
        self.addresses = [each.ready(_START_S) for each in self._coordinators]
        self._verify = psutil.Process(verify.process.pid)

    def _start(self, module: str, flags: Sequence[str]) -> Service:
        service = Service(module, flags)
        self._stack.callback(service.stop)
        return service

    def _ranks(self) -> list[psutil.Process]:
        return [each for each in self._verify.children(recursive=True) if _line(each).startswith("ray::Rank")]

    def _replica(self) -> psutil.Process:
        return next(each for each in self._verify.children() if "verify_service" in _line(each))

    def kill(self, victim: str) -> None:
        """One of `VICTIMS`."""
        found: dict[str, Callable[[], psutil.Process | Service]] = {
            RANK: lambda: self._ranks()[0],
            VERIFY: self._replica,
            COORDINATOR: lambda: self._coordinators[0],
        }
        found[victim]().kill()


def _line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


async def _write(client: AsyncClient, index: int, num_tokens: int, num_draft_tokens: int | None) -> Text:
    """The text of a request; every fourth one is greedy."""
    rng = np.random.default_rng(index)
    params = SamplingParams(
        rule=Rule.GUMBEL,
        seed=index,
        temperature=float(index % 4 != 0),
        max_tokens=num_tokens,
        num_draft_tokens=num_draft_tokens,
        ignore_eos=True,
    )
    prompt = rng.integers(3, 90, rng.integers(3, 40)).tolist()
    done = await client.generate(params=params, prompt_token_ids=prompt)
    return Text(tuple(done.token_ids), done.reproducible)


async def _undisturbed(address: str, num_texts: int, num_tokens: int, num_streams: int) -> list[Text]:
    free = asyncio.Semaphore(num_streams)

    async def one(client: AsyncClient, index: int) -> Text:
        async with free:
            return await _write(client, index, num_tokens, 0)

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(one(client, index) for index in range(num_texts)))


async def _disturbed(processes: Processes, expected: list[Text]) -> Found:
    """All requests once, and again from the first until all was killed that is to be."""
    found, indices, is_over = Found(), count(), asyncio.Event()
    num_tokens = len(expected[0].token_ids)

    async def stream(client: AsyncClient) -> None:
        while (number := next(indices)) < len(expected) or not is_over.is_set():
            index, num_drafted = number % len(expected), _DRAFT_LENGTHS[number % len(_DRAFT_LENGTHS)]
            found.add(await _write(client, index, num_tokens, num_drafted), expected[index])

    async def kill(client: AsyncClient) -> None:
        for phase, victim in enumerate(VICTIMS, 1):
            least = phase * len(expected) // (len(VICTIMS) + 1)
            while found.num_texts < least or await _is_any_away(client):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(_POLL_S)
            processes.kill(victim)
            found.killed.append(victim)
        is_over.set()

    first, second = processes.addresses
    async with AsyncClient([first, second]) as one, AsyncClient([second, first]) as other:
        await asyncio.gather(kill(other), *(stream((one, other)[i % 2]) for i in range(NUM_STREAMS)))
    return found


async def _is_any_away(client: AsyncClient) -> bool:
    """Whether a verify service cannot be used, as its coordinator sees it."""
    return any(each.unavailable for each in (await client.get_status()).verify_replicas)


def run(target: str, draft: str, num_texts: int, num_tokens: int, flags: Sequence[str]) -> Found:
    """Start everything, write the texts twice, and compare.

    Args:
        flags: of the verify services.
    """
    with contextlib.ExitStack() as stack:
        processes = Processes(stack, target, draft, flags)
        address = processes.addresses[0]
        expected = asyncio.run(_undisturbed(address, num_texts, num_tokens, _NUM_PLAIN_STREAMS))
        alone = asyncio.run(_undisturbed(address, min(num_texts, _NUM_ALONE), num_tokens, 1))
        found = asyncio.run(_disturbed(processes, expected))
    for text, as_expected in zip(alone, expected, strict=False):
        found.add(text, as_expected)
    return found


def main() -> int:
    """Run with and without it, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeded_texts", description=__doc__)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--control-texts", type=int, default=100, help="without --batch-invariant")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    pair = str(embedded.TARGET_DIR), str(embedded.DRAFT_DIR)
    ours = run(*pair, args.texts, args.tokens, ["--batch-invariant"])
    control = run(*pair, args.control_texts, args.tokens, [])
    rows = [
        [name, each.num_texts, each.num_differing, each.num_promised]
        for name, each in (("`--batch-invariant`", ours), ("without", control))
    ]
    result = Report(
        name="seeded_texts",
        title="A seed on two ranks",
        machine=machine(),
        about=(
            "The embedded pair, the target in bfloat16 on two ranks of one thread each, in two verify "
            f"services. Texts of {args.tokens} tokens, {NUM_STREAMS} at a time, with drafts of a chosen "
            f"length or of up to {max(filter(None, _DRAFT_LENGTHS))} tokens, every fourth greedy. Killed in "
            f"this order: {', '.join(ours.killed)}. Each is compared with the same request, plain and "
            f"undisturbed, {_NUM_PLAIN_STREAMS} at a time; so are {_NUM_ALONE} alone."
        ),
        bars=[
            Bar(what="texts that differ", measured=ours.num_differing, limit=0),
            Bar(what="texts compared", measured=ours.num_texts, limit=args.texts, at_least=True),
            Bar(what="control: texts that differ", measured=control.num_differing, limit=1, at_least=True),
        ],
        details=table(["", "texts", "differ", "`reproducible`"], rows),
        data={"batch_invariant": asdict(ours), "control": asdict(control)},
    )
    return result.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
