"""`python -m benchmarks.coordinator_round`: what a round costs in the coordinator itself.

The real `Generate` for many streams at once. Draft and verify are objects of this process that answer a
message with one; their time is taken off. What is left is the coordinator's own work for a round: plan, the
messages to draft and verify but for their transport, rule, commit, text, counts, learning, and the message to
the client. The client is first an object as well, then another process over gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from benchmarks.pipes import end, read_line, start_module
from coordinator.peers.addresses import Names
from coordinator.peers.codecs import draft_codec, verify_codec
from coordinator.peers.link import Codec, Link
from coordinator.peers.pool import Pool
from coordinator.peers.replicas import Replica
from coordinator.servicer import GenerationServicer
from specwire import embedded
from specwire.config.services import CoordinatorConfig
from specwire.core import Load, ModelInfo, Proposal, Rule, SamplingParams, Timings, Verdict
from specwire.rpc import private
from specwire.rpc.server import Server
from specwire.rpc.wire import client as wire
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import verify as verify_wire
from specwire.rpc.wire.draft import DraftAnswer
from specwire.rpc.wire.verify import VerifyAnswer
from specwire.support import Support
from specwire.telemetry import tracing
from specwire.text import tokenizer
from specwire.v1 import draft_pb2, generation_pb2, generation_pb2_grpc, verify_pb2

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
NUM_DRAFT_TOKENS, SUPPORT_SIZE, ALPHA = 4, 32, 0.8
VOCAB_SIZE = 400
RULES = ("greedy", "gumbel", "rejection", "block")
Result = TypeVar("Result")
_NUM_VARIANTS = 64
_PASS_S = 0.02
_TIMINGS = Timings(forward_ns=1, residence_ns=1)
_LOAD = Load(num_sequences=256, base_ns=15_000_000, sequence_ns=1, token_ns=1)
_INFO = ModelInfo(name="model", vocab_size=VOCAB_SIZE, context_len=1 << 20)


def params(rule: str, num_tokens: int) -> SamplingParams:
    """Of every stream."""
    return SamplingParams(
        max_tokens=num_tokens,
        temperature=0.0 if rule == "greedy" else 1.0,
        rule=Rule.GUMBEL if rule == "greedy" else Rule(rule),
        seed=1,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        ignore_eos=True,
    )


class Answers:
    """Proposals and verdicts made before: each draft token is the target's with probability `ALPHA`."""

    def __init__(self, *, matches_tokens: bool) -> None:
        rng = np.random.default_rng(0)
        self._made = [self._make(rng, matches_tokens) for _ in range(_NUM_VARIANTS)]

    @staticmethod
    def _make(rng: np.random.Generator, matches_tokens: bool) -> tuple[Proposal, Verdict]:
        drafted = rng.integers(0, VOCAB_SIZE, NUM_DRAFT_TOKENS)
        agrees = rng.random(NUM_DRAFT_TOKENS) < ALPHA
        bonus = int(rng.integers(0, VOCAB_SIZE))
        targets = np.where(agrees, drafted, (drafted + 1) % VOCAB_SIZE)
        if matches_tokens:
            return Proposal(0, drafted.tolist(), source="draft"), Verdict(0, [*targets.tolist(), bonus])
        supports, probs = [], []
        for token_id, agreed in zip(drafted, agrees, strict=True):
            others = rng.permutation(np.delete(np.arange(VOCAB_SIZE), token_id))[: SUPPORT_SIZE - 1]
            shares = rng.random(SUPPORT_SIZE).astype(np.float32)
            shares /= shares.sum()
            supports.append(Support(np.append(token_id, others), shares))
            probs.append(shares if agreed else np.zeros_like(shares))
        proposal = Proposal(0, drafted.tolist(), supports, source="draft")
        return proposal, Verdict(0, [*targets.tolist(), bonus], probs, (1.0 - agrees).tolist())

    def at(self, base_len: int) -> tuple[Proposal, Verdict]:
        """For a round that begins there."""
        made, judged = self._made[base_len % _NUM_VARIANTS]
        return (
            Proposal(base_len, made.token_ids, made.supports, made.source),
            Verdict(base_len, judged.target_token_ids, judged.target_probs, judged.tail_mass),
        )


class Peers:
    """The model services of all streams.

    Attributes:
        spent_ns: their own processor time.
        num_rounds: verified so far.
    """

    def __init__(self, answers: Answers, pass_s: float) -> None:
        """Args:
        pass_s: that an answer takes; none of it is processor time.
        """
        self._answers, self._pass_s = answers, pass_s
        self.spent_ns = self.num_rounds = 0

    def draft(self, request: draft_pb2.DraftRequest) -> Any:
        """The proposals that a message asks for, in one message."""
        lens = self._committed_lens(request)
        answers = [
            DraftAnswer(sequence_id, request_id, self._answers.at(length)[0].first(num), _TIMINGS)
            for sequence_id, request_id, length, num in zip(
                request.sequence_ids, request.request_ids, lens, request.num_draft_tokens, strict=True
            )
        ]
        return draft_wire.response_to_proto(answers, (), (), "", SUPPORT_SIZE)

    def verify(self, request: verify_pb2.VerifyRequest) -> Any:
        """The verdicts that a message asks for, in one message."""
        self.num_rounds += len(request.sequence_ids)
        lens = self._committed_lens(request)
        answers = [
            VerifyAnswer(sequence_id, request_id, _first(self._answers.at(length)[1], num), _TIMINGS, 0)
            for sequence_id, request_id, length, num in zip(
                request.sequence_ids, request.request_ids, lens, request.proposals.num_tokens, strict=True
            )
        ]
        return verify_wire.response_to_proto(answers, (), _LOAD, "")

    @staticmethod
    def _committed_lens(request: Any) -> list[int]:
        return [*map(int.__add__, request.base_lens, request.num_tokens)]

    def replica(self, role: str, codec: Codec) -> Replica:
        """A service whose messages stay in this process."""
        answer = self.draft if role == "draft" else self.verify

        def timed(request: Any) -> Any:
            started_ns = time.thread_time_ns()
            response = answer(request)
            self.spent_ns += time.thread_time_ns() - started_ns
            return response

        return _Replica(role, lambda: Link(_Call(timed, self._pass_s), codec))


def _first(verdict: Verdict, num_tokens: int) -> Verdict:
    """On so many of the tokens that were drafted."""
    return Verdict(
        verdict.base_len,
        verdict.target_token_ids[: num_tokens + 1],
        verdict.target_probs[:num_tokens],
        verdict.tail_mass[:num_tokens],
    )


class _Call:
    """A stream to a service; see `link.Call`."""

    def __init__(self, answer: Callable[[Any], Any], pass_s: float) -> None:
        self._answer, self._pass_s = answer, pass_s
        self._requests: asyncio.Queue[Any] = asyncio.Queue()

    async def send(self, request: Any) -> None:
        self._requests.put_nowait(request)

    async def read(self) -> Any:
        """The answers to all requests that have come until a pass begins."""
        while True:
            asked = await self._requests.get()
            while not self._requests.empty():
                asked.MergeFrom(self._requests.get_nowait())
            await asyncio.sleep(self._pass_s)
            if asked.sequence_ids:
                return self._answer(asked)

    def cancel(self) -> None:
        """Nothing is left."""


class _Replica(Replica):
    """A service of this process."""

    def __init__(self, role: str, open_link: Callable[[], Link]) -> None:
        super().__init__(role, "here")
        self._make_link = open_link
        self.mark_ready(_INFO)

    def _open_link(self) -> Link:
        return self._make_link()


class _Pool(Pool):
    """A single replica."""

    info = _INFO

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica.role, "", lambda _: replica, Names(), is_needed=True)
        self.add(replica)


class Servicer(GenerationServicer):
    """With `Peers` as the model services."""

    def __init__(self, peers: Peers, num_streams: int, *, with_text: bool) -> None:
        verify: Any = _Pool(peers.replica("verify", verify_codec(VOCAB_SIZE)))
        draft: Any = _Pool(peers.replica("draft", draft_codec(VOCAB_SIZE, "draft")))
        config = CoordinatorConfig(
            address="127.0.0.1:0", draft_address="127.0.0.1:1", num_outcomes="0", max_running=num_streams
        )
        self.config = config
        loaded = tokenizer.load(embedded.TARGET_DIR) if with_text else None
        super().__init__(config, verify, draft, loaded, tracing.Tracing())


class _Client:
    """The context of a call whose client takes everything at once."""

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        """Taken."""

    def time_remaining(self) -> None:
        """No deadline."""

    def peer(self) -> str:
        return "benchmark"

    def invocation_metadata(self) -> tuple[()]:
        return ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        with_text: tokens have text.
    """

    rule: str
    num_streams: int = 256
    num_tokens: int = 128
    with_text: bool = False

    def request(self) -> generation_pb2.GenerateRequest:
        """Of every stream."""
        return wire.generate_request(None, params(self.rule, self.num_tokens), PROMPT)

    def servicer(self, pass_s: float = 0.0) -> tuple[Servicer, Peers]:
        """Ready for all streams."""
        peers = Peers(Answers(matches_tokens=params(self.rule, 1).matches_tokens), pass_s)
        return Servicer(peers, self.num_streams, with_text=self.with_text), peers


async def _requests(message: generation_pb2.GenerateRequest) -> AsyncIterator[generation_pb2.GenerateRequest]:
    yield message


async def own_us(case: Case, profile: cProfile.Profile | None = None) -> float:
    """Processor time of a round without gRPC, in microseconds."""
    servicer, peers = case.servicer()
    message = case.request()
    started_ns = time.process_time_ns()
    if profile:
        profile.enable()
    calls = (servicer.Generate(_requests(message), _Client()) for _ in range(case.num_streams))
    await asyncio.gather(*calls)
    if profile:
        profile.disable()
    return (time.process_time_ns() - started_ns - peers.spent_ns) / peers.num_rounds / 1e3


# --- over gRPC ------------------------------------------------------------------------------------


async def served_us(case: Case) -> float:
    """Processor time of the server's process a round over gRPC, in microseconds."""
    servicer, peers = case.servicer(_PASS_S)  # in which each client takes a message
    server = Server(servicer.config, [])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
    address = await server.start()
    client = start_module("benchmarks.coordinator_round", "--read", address, *_arguments(case))
    await asyncio.to_thread(read_line, client)  # connected
    started_ns = time.process_time_ns()
    assert client.stdin is not None
    client.stdin.write("\n")
    client.stdin.flush()
    await asyncio.to_thread(read_line, client)  # all was read
    spent_ns = time.process_time_ns() - started_ns - peers.spent_ns
    end(client)
    await server.stop()
    return spent_ns / peers.num_rounds / 1e3


def _arguments(case: Case) -> list[str]:
    return ["--rules", case.rule, "--streams", str(case.num_streams), "--tokens", str(case.num_tokens)]


async def _read(address: str, case: Case) -> None:
    """The client's process: all streams at once, when it is told to."""
    import grpc.aio

    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        print(flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def read_one() -> None:
            async for _ in stub.Generate(_requests(case.request())):
                pass

        await asyncio.gather(*(read_one() for _ in range(case.num_streams)))
        print(flush=True)
        await asyncio.to_thread(sys.stdin.readline)


def _run(measured: Coroutine[Any, Any, Result]) -> Result:
    """In the loop that services have."""
    with asyncio.Runner(loop_factory=private.Loop) as runner:
        return runner.run(measured)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.coordinator_round", description=__doc__)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--streams", type=int, default=Case.num_streams, help="at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=Case.num_tokens, help="of each (default %(default)s)")
    parser.add_argument("--text", action="store_true", help="tokens have text")
    parser.add_argument("--repetitions", type=int, default=3, help="the least counts (default %(default)s)")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N largest costs")
    parser.add_argument("--read", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    cases = [
        Case(rule=rule, num_streams=args.streams, num_tokens=args.tokens, with_text=args.text)
        for rule in args.rules
    ]
    if args.read:
        asyncio.run(_read(args.read, cases[0]))
        return 0
    for case in cases:
        own = min(_run(own_us(case)) for _ in range(args.repetitions))
        over_grpc = min(_run(served_us(case)) for _ in range(args.repetitions))
        print(f"{case.rule}: {own:.0f} us, over gRPC {over_grpc:.0f} us", flush=True)
        if args.profile:
            profile = cProfile.Profile()
            asyncio.run(own_us(case, profile))
            pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
