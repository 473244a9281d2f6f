"""`python -m benchmarks.methods`: every way to draft beside plain decoding, with lengths that it chooses.

One stream, in turns with plain decoding of the same prompts by the same services, and of the same text where
a seed fixes it. Own passes of the embedded target, and passes of 60 ms, as of a larger one. What has to be
trained is taken from `--models` (`heads`, `inner`, `other`, `learnt`, `mtp`, `dflash`, `eagle3`); what is not
there is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, stdev
from typing import Any, NamedTuple

from benchmarks.prompts import python_windows
from benchmarks.report import RESULTS, Bar, Report, machine, table
from specwire import Client, Completion, Rule, SamplingParams, embedded
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig

LEAST_RATIO = 0.98
PASS_MS = 60.0
STACK = UpConfig(
    dtype="float32",
    draft_dtype="float32",
    draft_placement="service",
    address="127.0.0.1:0",
    num_threads=1,
)
GREEDY = {"greedy": SamplingParams(temperature=0, ignore_eos=True)}
SAMPLED = {"temperature 1": SamplingParams(ignore_eos=True)}
COUPLED = {"Gumbel": SamplingParams(rule=Rule.GUMBEL, seed=0, ignore_eos=True)}
"""By default, temperature 1 without a seed is block verification."""
DEFAULT = "embedded draft"
SKIPPED = "m1,a2,m2,a3,m3,a4,m4"
"""The blocks that `specwire search-layers` finds (benchmarks/results/layers.md)."""


MODEL = "MODEL"
"""In a setting: the directory of what the method needs."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to draft.

    Attributes:
        needs: name in the folder of models; empty if the package has it.
        settings: of the stack, beside `STACK`.
        kinds: of requests.
    """

    needs: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, SamplingParams] = field(default_factory=lambda: GREEDY | COUPLED)

    def config(self, models: Path, least_pass_ms: float) -> UpConfig:
        """Of its stack; what it needs is there."""
        directory = str(models / self.needs)
        settings: dict[str, Any] = {
            name: value.replace(MODEL, directory) if isinstance(value, str) else value
            for name, value in self.settings.items()
        }
        return replace(STACK, least_pass_ms=least_pass_ms, **settings)


def _speculative(**keys: Any) -> str:
    return json.dumps({"method": "draft_model"} | keys)


METHODS = {
    DEFAULT: Method(kinds=GREEDY | SAMPLED | COUPLED),
    "heads": Method(needs="heads", settings={"draft": f"heads:{MODEL}"}),
    "MTP": Method(needs="mtp", settings={"target": MODEL, "draft": "mtp"}),
    "block drafter": Method(needs="dflash", settings={"draft": f"dflash:{MODEL}"}),
    "EAGLE-3": Method(needs="eagle3", settings={"draft": f"eagle3:{MODEL}"}),
    "layers left out": Method(settings={"draft": f"layers:{SKIPPED}"}),
    "draft that learns": Method(
        needs="learnt", settings={"draft": MODEL, "draft_learn": True}, kinds=GREEDY | SAMPLED
    ),
    "k-SEQ, 4 chains": Method(
        settings={"speculative_config": _speculative(selection="kseq", num_chains=4)}, kinds=SAMPLED
    ),
    "another vocabulary": Method(
        needs="other",
        settings={"draft": MODEL, "speculative_config": _speculative(use_heterogeneous_vocab=True)},
        kinds=GREEDY | SAMPLED,
    ),
    "ngram>draft": Method(settings={"draft": f"ngram>{embedded.DRAFT_DIR}"}),
    "model>draft": Method(needs="inner", settings={"draft": f"{MODEL}>{embedded.DRAFT_DIR}"}),
    "beam search, 4 beams": Method(kinds={"greedy": replace(GREEDY["greedy"], num_beams=4)}),
}


class Found(NamedTuple):
    """One method, one kind of requests, one length of passes.

    Attributes:
        acceptance: share of draft tokens that were accepted.
        tokens_a_pass: of the target.
        rate: tokens/s, the median.
        ratio: to plain decoding, the median of pairs.
        ratios: of all pairs.
    """

    acceptance: float
    tokens_a_pass: float
    rate: float
    ratio: float
    ratios: list[float]

    @property
    def error(self) -> float:
        """Standard error of the ratio, as of the median of normal numbers."""
        return 1.25 * stdev(self.ratios) / math.sqrt(len(self.ratios))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured after how many tokens of settling."""

    num_runs: int
    num_tokens: int
    num_settling: int


OWN = Plan(num_runs=24, num_tokens=48, num_settling=600)
PACED = Plan(num_runs=4, num_tokens=64, num_settling=160)


def measure(method: Method, config: UpConfig, plan: Plan) -> Iterator[tuple[str, Found]]:
    """All kinds of requests, with services of their own."""
    prompts = python_windows(plan.num_runs)
    with Stack(config) as stack, Client(stack.address) as client:
        for kind, params in method.kinds.items():
            settling = replace(params, max_tokens=plan.num_tokens)
            for number in range(-(-plan.num_settling // plan.num_tokens)):
                client.generate(params=settling, prompt_token_ids=prompts[number % len(prompts)])
            yield kind, _in_turns(client, replace(params, max_tokens=plan.num_tokens), prompts)


def _in_turns(client: Client, params: SamplingParams, prompts: Sequence[Sequence[int]]) -> Found:
    """Both ways after each prompt, each of them first in turns."""
    done: dict[int | None, list[Completion]] = {None: [], 0: []}
    for number, prompt in enumerate(prompts):
        for num_draft_tokens in (None, 0) if number % 2 else (0, None):
            given = replace(params, num_draft_tokens=num_draft_tokens)
            if params.seed is not None:
                given = replace(given, seed=number)
            done[num_draft_tokens].append(client.generate(params=given, prompt_token_ids=prompt))
    drafted, plain = done[None], done[0]
    ratios = [_rate(a) / _rate(b) for a, b in zip(drafted, plain, strict=True)]
    counts = [each.speculation for each in drafted]
    num_draft_tokens = sum(each.num_draft_tokens for each in counts)
    return Found(
        acceptance=sum(each.num_accepted_tokens for each in counts) / max(1, num_draft_tokens),
        tokens_a_pass=sum(len(each.token_ids) for each in drafted) / sum(each.num_rounds for each in counts),
        rate=median(map(_rate, drafted)),
        ratio=median(ratios),
        ratios=ratios,
    )


def _rate(done: Completion) -> float:
    return len(done.token_ids) / done.timing.total_ms * 1e3


# --- report -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A line of the table."""

    method: str
    kind: str
    own: Found
    paced: Found

    @property
    def bars(self) -> list[Bar]:
        """Never slower than plain decoding."""
        passes = {"own passes": self.own, f"passes of {PASS_MS:g} ms": self.paced}
        return [
            Bar(
                what=f"{self.method}, {self.kind}, {name}: tokens/s over plain",
                measured=found.ratio,
                limit=LEAST_RATIO,
                at_least=True,
            )
            for name, found in passes.items()
        ]

    def cells(self, default: Mapping[str, Row]) -> list[Any]:
        """With times the default draft, where that has such requests."""
        parts: list[Any] = [self.method, self.kind]
        beside = default.get(self.kind)
        for found, other in ((self.own, beside and beside.own), (self.paced, beside and beside.paced)):
            over = f"{found.ratio / other.ratio:.2f}" if other else "-"
            shown = f"{found.ratio:.2f} ± {found.error:.2f}"
            parts += [found.acceptance, found.tokens_a_pass, found.rate, shown, over]
        return parts


_ONE = ["accepted of drafted", "tokens a pass", "tokens/s", "× plain", "× default"]
HEAD = ["", "", *_ONE, *(f"{each}, 60 ms" for each in _ONE)]


def main() -> int:
    """Measure what is asked for; the report has the latest of all that were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument("names", nargs="*", help="of methods; all by default")
    parser.add_argument("--models", type=Path, required=True, help="folder of what was trained")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    names = args.names or list(METHODS)
    missing = [name for name, each in METHODS.items() if not (args.models / each.needs).exists()]
    rows = _earlier(args.out)
    for name in names:
        if name in missing:
            continue
        method = METHODS[name]
        own, paced = (
            dict(measure(method, method.config(args.models, pass_ms), plan))
            for plan, pass_ms in ((OWN, 0.0), (PACED, PASS_MS))
        )
        for kind in own:
            rows[name, kind] = Row(name, kind, own[kind], paced[kind])
            print(*rows[name, kind], flush=True)
    return _report(list(rows.values()), missing, facts).finish(args.out)


def _report(rows: Sequence[Row], missing: Sequence[str], facts: Mapping[str, str]) -> Report:
    default = {row.kind: row for row in rows if row.method == DEFAULT}
    left_out = f" Not measured, for want of a model: {', '.join(missing)}." if missing else ""
    about = (
        f"Embedded target in float32, one stream; {OWN.num_runs} prompts of {OWN.num_tokens} tokens, and "
        f"{PACED.num_runs} of {PACED.num_tokens} with passes of {PASS_MS:g} ms. Medians; ratios are those of "
        f"pairs. `× default`: over the embedded draft's gain with the same kind of requests.{left_out}"
    )
    return Report(
        name="methods",
        title="Every way to draft",
        machine=facts,
        about=about,
        bars=[bar for row in rows for bar in row.bars],
        details=table(HEAD, [row.cells(default) for row in rows]),
        data={"rows": [[row.method, row.kind, row.own._asdict(), row.paced._asdict()] for row in rows]},
    )


def _earlier(out: Path) -> dict[tuple[str, str], Row]:
    """Rows of the report that is there, in the order of the methods."""
    path = out / "methods.json"
    read = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {(name, kind): Row(name, kind, Found(**own), Found(**paced)) for name, kind, own, paced in read}
    return {key: found[key] for name in METHODS for key in found if key[0] == name}


if __name__ == "__main__":
    sys.exit(main())
