"""`specwire demo --compare`: one prompt and one seed, plainly and with each kind of draft in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specwire.cli.terminal import table
from specwire.client.client import Client
from specwire.completion import Completion
from specwire.config.speculative import MODEL, NGRAM
from specwire.core import ModelInfo, Rule, SamplingParams
from tools.bench.spec_bench import TREE, methods


@dataclass(frozen=True, kw_only=True)
class DraftKind:
    """A kind of draft.

    Attributes:
        name: as the table has it.
        about: what proposes, and what it proposes.
        changes: of the request's parameters.
        needs_trees: whether target and draft must be able to do trees.
        needs_chance: whether it differs from the kinds before it above temperature 0 only.
    """

    name: str
    about: str
    changes: dict[str, Any]
    needs_trees: bool = False
    needs_chance: bool = False

    def unavailable(self, params: SamplingParams, target: ModelInfo, draft: ModelInfo | None) -> str:
        """Why it cannot be shown; empty if it can."""
        there = methods(target, draft)
        if self.changes.get("draft") == MODEL and MODEL not in there:
            return "there is no draft model"
        if self.needs_trees and TREE not in there:
            return "target or draft cannot do trees"
        if self.needs_chance and params.greedy:
            return "greedy decoding compares tokens under every rule"
        return ""


KINDS = (
    DraftKind(name="plain", about="no draft", changes={"num_draft_tokens": 0}),
    DraftKind(
        name="chain", about="a line of guesses of the draft model", changes={"draft": MODEL, "max_depth": 0}
    ),
    DraftKind(
        name="block",
        about="the same, judged as a whole",
        changes={"draft": MODEL, "rule": Rule.BLOCK},
        needs_chance=True,
    ),
    DraftKind(
        name="tree",
        about="32 guesses of the draft model that branch, at most 6 in a row",
        changes={"draft": MODEL, "rule": Rule.GUMBEL, "num_draft_tokens": 32, "max_depth": 6},
        needs_trees=True,
    ),
    DraftKind(name=NGRAM, about="guesses from the text itself", changes={"draft": NGRAM}),
)
Result = tuple[DraftKind, Completion | str]
"""A kind with its completion, or with why there is none."""


def results(
    client: Client, params: SamplingParams, generate: Callable[[str, SamplingParams], Completion]
) -> Iterator[Result]:
    """Each kind in turn, alone on the machine.

    Raises:
        SpecwireError: a generation failed.
    """
    target, draft = client.get_model_info()
    for kind in KINDS:
        why_not = kind.unavailable(params, target, draft)
        asked = dataclasses.replace(params, **kind.changes)
        yield kind, why_not or generate(f"{kind.name}, {kind.about}:", asked)


def to_dict(compared: list[Result]) -> dict[str, Any]:
    """JSON-ready: the completion of each kind, or why there is none."""
    return {
        kind.name: {"unavailable": found} if isinstance(found, str) else found.to_dict()
        for kind, found in compared
    }


def summary(compared: list[Result], colour: bool) -> str:
    """A row for each kind."""
    plain = compared[0][1]
    assert isinstance(plain, Completion)
    rows = [("", f"{'tokens a pass':>13}  tokens/s  times plain  text")]
    for kind, found in compared:
        if isinstance(found, str):
            words = f"not available: {found}"
        else:
            speed, tokens_a_pass = tokens_per_s(found), found.speculation.tokens_per_round
            words = f"{tokens_a_pass:13.2f}  {speed:8.0f}  {speed / tokens_per_s(plain):11.2f}"
            words += "" if found is plain else f"  {likeness(found, plain)}"
        rows.append((kind.name, words))
    return "\n".join(["", *table(rows, colour)])


def tokens_per_s(done: Completion) -> float:
    """From the arrival of the request to the end."""
    return done.usage.completion_tokens / done.timing.total_ms * 1e3


def likeness(done: Completion, plain: Completion) -> str:
    """Whether a text is that of plain decoding."""
    same = done.token_ids == plain.token_ids
    return "the same, token for token" if same else "another draw from the same distribution"
