"""`python -m benchmarks.contention`: do the gRPC side and the compute side of a model service fight over the
interpreter?

The same rounds on the same model, by an engine in a process without gRPC, whose event loop idles while it
computes, and by a verify service. What a compute process of its own could gain is the difference between the
two forward passes, less the hop to it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bars import Bar, Report, machine
from benchmarks.stats import ratios, summarise
from coordinator.peers.codecs import verify_codec
from coordinator.peers.link import Link
from coordinator.peers.streams import GrpcCall
from specwire import SamplingParams
from specwire.cli.process import Service
from specwire.config.services import VerifyConfig
from specwire.engine import boot
from specwire.errors import SpecwireError
from specwire.rpc.channel import open_channel
from specwire.v1 import verify_pb2_grpc
from specwire.wire import model as wire
from specwire.wire.verify import VerifyAnswer, VerifyOrder
from verify_service.verifier import VerifyDecider, VerifyJob

_PROMPT_LEN = 100
_VOCAB_SIZE = 2048
_PARAMS = SamplingParams(temperature=0, seed=1, max_tokens=1)
_MODEL: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
_START_TIMEOUT_S = 120.0

Found = tuple[float, float]
"""Median forward pass and mean round, in milliseconds."""


async def alone(service: boot.ModelService, num_streams: int, num_rounds: int) -> Found:
    """Rounds of one token for each stream, all streams together, no gRPC in the process."""
    sequences = [service.engine.open(_PARAMS, _PROMPT_LEN) for _ in range(num_streams)]
    forward_ms: list[float] = []

    async def run(base_len: int, token_ids: list[int]) -> None:
        jobs = [VerifyJob(sequence, base_len, token_ids) for sequence in sequences]
        await asyncio.gather(*(service.engine.run(job) for job in jobs))
        forward_ms.extend(job.forward_ns / 1e6 for job in jobs)

    await run(0, [5] * _PROMPT_LEN)
    forward_ms.clear()
    started_s = time.perf_counter()
    for number in range(num_rounds):
        await run(_PROMPT_LEN + number, [7])
    round_ms = (time.perf_counter() - started_s) / num_rounds * 1e3
    for sequence in sequences:
        service.engine.close_sequence(sequence)
    return median(forward_ms), round_ms


async def over_grpc(address: str, num_streams: int, num_rounds: int) -> Found:
    """The same rounds through the service, each sequence at its own pace, as a coordinator sends them."""
    forward_ms: list[float] = []
    async with open_channel(address) as channel:
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        link = Link(GrpcCall(stub.Verify()), verify_codec(_VOCAB_SIZE))
        sequences = [_Rounds(link) for _ in range(num_streams)]
        # Different prompts: no sequence shares the prefix of another.
        await asyncio.gather(*(each.run(0, [5 + i] * _PROMPT_LEN) for i, each in enumerate(sequences)))

        async def run(sequence: _Rounds) -> None:
            for number in range(num_rounds):
                forward_ms.append(await sequence.run(_PROMPT_LEN + number, [7]))

        started_s = time.perf_counter()
        await asyncio.gather(*map(run, sequences))
        round_ms = (time.perf_counter() - started_s) / num_rounds * 1e3
        link.close()
        await link.ended()
    return median(forward_ms), round_ms


class _Rounds:
    """One sequence of a link, with a request at a time."""

    def __init__(self, link: Link) -> None:
        self.request_bytes = 0
        self._link = link
        self._answer: asyncio.Future[VerifyAnswer] = asyncio.get_running_loop().create_future()
        self._sequence_id = link.open(wire.open_sequence(_PARAMS, _PROMPT_LEN), self, None)

    async def run(self, base_len: int, token_ids: list[int]) -> float:
        """A round; returns its forward pass in milliseconds."""
        self._answer = asyncio.get_running_loop().create_future()
        self._link.put(VerifyOrder(self._sequence_id, 1, base_len, token_ids))
        return (await self._answer).timings.forward_ns / 1e6

    def received(self, answer: VerifyAnswer, num_bytes: int) -> None:
        """See `Receiver`."""
        self._answer.set_result(answer)

    def failed(self, error: SpecwireError) -> None:
        """See `Receiver`."""
        if not self._answer.done():
            self._answer.set_exception(error)


def compare(num_streams: int, num_rounds: int, repetitions: int) -> dict[str, list[Found]]:
    """Both ways by turns."""
    found: dict[str, list[Found]] = {"alone": [], "over gRPC": []}
    engine = boot.start(VerifyConfig(**_MODEL), "verify", VerifyDecider())
    service = Service(
        "verify_service", ["--dtype", "float32", "--num-threads", "1", "--address", "127.0.0.1:0"]
    )
    try:
        address = service.ready(_START_TIMEOUT_S)
        for _ in range(repetitions):
            found["alone"].append(asyncio.run(alone(engine, num_streams, num_rounds)))
            found["over gRPC"].append(asyncio.run(over_grpc(address, num_streams, num_rounds)))
    finally:
        service.stop()
        engine.engine.close()
    return found


def _row(num_streams: int, found: dict[str, list[Found]]) -> str:
    ours, theirs = found["over gRPC"], found["alone"]
    ratio = summarise(ratios([f for f, _ in ours], [f for f, _ in theirs]))
    cells = [f"{summarise([pair[i] for pair in side]).text(2)}" for i in (0, 1) for side in (theirs, ours)]
    return f"| {num_streams} | {cells[0]} | {cells[1]} | {ratio.text(3)} | {cells[2]} | {cells[3]} |"


def main() -> None:
    """Measure for 1 and 16 streams, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contention", description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    found = {n: compare(n, args.rounds, args.repetitions) for n in (1, 16)}
    worst = max(
        summarise(ratios([f for f, _ in pair["over gRPC"]], [f for f, _ in pair["alone"]])).median
        for pair in found.values()
    )
    head = [
        "| streams | forward alone (ms) | over gRPC (ms) | ratio | round alone (ms) | over gRPC (ms) |",
        "|---|---|---|---|---|---|",
    ]
    result = Report(
        name="contention",
        title="gRPC and compute in one process",
        machine=machine(),
        about=f"Embedded target in float32 on one thread; {args.rounds} rounds of one token a stream, "
        f"{args.repetitions} interleaved repetitions. Median (least to greatest).",
        bars=[Bar(what="forward pass beside gRPC over alone", measured=worst, limit=1.1)],
        details="\n".join([*head, *(_row(n, pair) for n, pair in found.items())]),
        data={"found": {str(n): pair for n, pair in found.items()}},
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
