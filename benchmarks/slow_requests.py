"""`python -m benchmarks.slow_requests`: five requests, slow for five reasons, and what their ledgers say.

Emulated devices in processes of their own, traced. `specwire timeline` draws each request, for
`docs/jaeger.md`; the bars say that the stage to blame is the largest, and that the stages add up.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bars import Bar, Report, machine
from specwire import Client, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.completion import Stage
from specwire.config.stack import UpConfig
from tools.timeline import layout, picture
from tools.timeline.generation import GenerationTrace, generations
from tools.timeline.layout import Timeline
from tools.timeline.receiver import Receiver

PROMPT = [7, 8, 9] * 4
LONG_PROMPT = [5, 6, 7] * 500
_BESIDE_S, _READ_S = 0.1, 0.2
_HANGS_AFTER, _HANGS_S = 3, 0.9
"""Rounds, one a chunk; then seconds, less than the coordinator waits for a proposal."""

Run = Callable[[Stack, Client], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A reason to be slow.

    Attributes:
        name: of the picture's file.
        blamed: the stage that should be the largest.
        run: generates; the request that spent most in `blamed` is drawn.
        environ: of the services.
        rounds: what is drawn; None for those in the middle.
    """

    name: str
    title: str
    blamed: Stage
    config: UpConfig
    run: Run
    environ: Mapping[str, str] = field(default_factory=dict)
    rounds: range | None = None


def stack(target: str, draft: str, *, num_outcomes: str = "0", draft_rtt_ms: float = 0.0) -> UpConfig:
    """Three services on emulated devices; four draft tokens a round."""
    return UpConfig(
        target=f"emulated:{target}",
        draft=f"emulated:{draft}",
        num_draft_tokens="4",
        num_outcomes=num_outcomes,
        draft_rtt_ms=draft_rtt_ms,
        address="127.0.0.1:0",
        grace_s=0.0,
    )


def params(max_tokens: int, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, rule=Rule.GUMBEL)


def alone(_running: Stack, client: Client) -> None:
    client.generate(params=params(32), prompt_token_ids=PROMPT)


def eight(_running: Stack, client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda seed: client.generate(params=params(32, seed), prompt_token_ids=PROMPT), range(8))
        )


def beside_a_long_prompt(_running: Stack, client: Client) -> None:
    with ThreadPoolExecutor(5) as pool:
        streams = [
            pool.submit(client.generate, params=params(48, seed), prompt_token_ids=[seed, *PROMPT])
            for seed in range(1, 5)
        ]
        time.sleep(_BESIDE_S)  # they are in their rounds
        client.generate(params=params(2), prompt_token_ids=LONG_PROMPT)
        for each in streams:
            each.result()


def draft_hangs_and_dies(running: Stack, client: Client) -> None:
    [draft] = [service for service in running.services if service.module == "draft_service"]
    dies = threading.Timer(_HANGS_S, draft.kill)
    with client.stream(params=params(28), prompt_token_ids=PROMPT) as stream:
        for number, _ in enumerate(stream, start=1):
            if number == _HANGS_AFTER:
                draft.process.send_signal(signal.SIGSTOP)
                dies.start()
    dies.join()


def reads_slowly(_running: Stack, client: Client) -> None:
    with client.stream(params=params(128), prompt_token_ids=PROMPT) as stream:
        for _ in stream:
            time.sleep(_READ_S)


CASES = (
    Case(
        name="far-draft",
        title="a draft 60 ms away, nothing prepared",
        blamed=Stage.DRAFT_NETWORK,
        config=stack("step_ms=30", "step_ms=2,alpha=0.8", draft_rtt_ms=60.0),
        run=alone,
    ),
    Case(
        name="full-queue",
        title="the last of eight requests, two at a time",
        blamed=Stage.ADMISSION,
        config=stack("step_ms=20", "step_ms=2,alpha=0.8"),
        environ={"SPECWIRE_MAX_RUNNING": "2"},
        run=eight,
    ),
    Case(
        name="long-prompt-beside",
        title="one of four streams beside a prompt of 1,500 tokens",
        blamed=Stage.VERIFY_QUEUE,
        config=stack("step_ms=10,token_us=400", "step_ms=1,alpha=0.8"),
        environ={"SPECWIRE_MAX_PREFILL_TOKENS": "2048"},
        run=beside_a_long_prompt,
    ),
    Case(
        name="lost-draft",
        title="a draft that hangs after 3 rounds, and is killed 0.9 s later",
        blamed=Stage.FAILOVER,
        config=stack("step_ms=30", "step_ms=2,alpha=0.8"),
        run=draft_hangs_and_dies,
        rounds=range(10),
    ),
    Case(
        name="slow-client",
        title="a client that reads every 200 ms",
        blamed=Stage.CLIENT_CREDIT,
        config=stack("step_ms=20", "step_ms=2,alpha=0.8"),
        run=reads_slowly,
    ),
)


def measure(case: Case) -> GenerationTrace:
    """Run it after a short generation that is not counted; returns the slowest by the stage to blame.

    Raises:
        SpecwireError: the services did not start, or a generation failed.
    """
    with Receiver() as receiver:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "20",  # what is killed exports nothing more
            **case.environ,
        }
        with Stack(case.config, environ) as running, Client(running.address) as client:
            client.generate(params=params(8), prompt_token_ids=[1, 2])
            case.run(running, client)
        _, *found = generations(receiver.spans)  # services export what is left when they end
    return max(found, key=lambda one: layout.make(one).stages_ms.get(case.blamed, 0.0))


def draw(case: Case, generation: GenerationTrace, pictures: Path) -> None:
    """Write its picture, as `specwire timeline` does."""
    rounds = case.rounds or picture.middle(layout.make(generation))
    drawn = picture.render(layout.make(generation, rounds))
    (pictures / f"{case.name}.svg").write_text(drawn, encoding="utf-8")


def bars(case: Case, timeline: Timeline) -> list[Bar]:
    """That the blame is where it belongs, and that the ledger is whole."""
    stages_ms = dict(timeline.stages_ms)
    apart_ms = abs(sum(stages_ms.values()) - timeline.total_ns / 1e6)
    blamed_ms = stages_ms.pop(case.blamed, 0.0)
    what = f"{case.title}: {case.blamed} over the largest other stage"
    return [
        Bar(what=what, measured=blamed_ms / max(stages_ms.values()), limit=1.0, at_least=True),
        Bar(what=f"{case.title}: sum of stages against the span", measured=apart_ms, limit=1.0, unit="ms"),
    ]


def table(found: Sequence[Timeline]) -> str:
    """The ledgers side by side, in milliseconds."""
    names = [case.name.replace("-", " ") for case in CASES]
    lines = [f"| ms | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for stage in Stage:
        cells = [f"{each.stages_ms.get(stage, 0.0):.1f}" for each in found]
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    lines.append(f"| sum | {' | '.join(f'{sum(each.stages_ms.values()):.1f}' for each in found)} |")
    lines.append(f"| ahead | {' | '.join(f'{each.ahead_ms or 0.0:.1f}' for each in found)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all, draw them, print the tables, write the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_requests", description=__doc__)
    parser.add_argument(
        "--only", choices=[case.name for case in CASES], help="draw one, and write no results"
    )
    parser.add_argument(
        "--pictures", type=Path, default=Path("docs/pictures"), help="folder for the pictures"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    args.pictures.mkdir(parents=True, exist_ok=True)
    found = {}
    for case in CASES:
        if args.only in (None, case.name):
            generation = measure(case)
            found[case] = layout.make(generation)
            draw(case, generation, args.pictures)
            print({str(stage): round(ms, 1) for stage, ms in found[case].stages_ms.items()})
    if args.only:
        return
    result = Report(
        name="slow_requests",
        title="Five slow requests",
        machine=facts,
        about="Emulated devices in processes of their own, Gumbel coupling, four draft tokens a round. The "
        "walk through them is in [docs/jaeger.md](../../docs/jaeger.md).",
        bars=[bar for case, timeline in found.items() for bar in bars(case, timeline)],
        details=table(list(found.values())),
        data={"stages_ms": {case.name: dict(timeline.stages_ms) for case, timeline in found.items()}},
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
