"""How much of our code a steady round passes through, and that docs/architecture.md names where."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from specwire.core import Rule, SamplingParams
from tests.support.harness import LocalStack, local_stack
from tests.support.pairs import save_good_draft, save_target

ROOT = Path(__file__).parents[2]
CORE = re.compile(
    rf"{ROOT}/((?:coordinator|draft_service|verify_service|specwire/(?!client/|engine/|rule/))[\w/]+\.py)"
)
"""Without the engine and the rule, whose passes are a matter of their own, and the client."""
MOST_CALLS, MOST_FUNCTIONS = 465, 246
"""447 and 243 were measured on 2026-11-30. Lower them as the path gets shorter."""
Calls = Counter[tuple[str, str]]
GUMBEL = SamplingParams(rule=Rule.GUMBEL, seed=3, num_draft_tokens=4, ignore_eos=True)
FEW, MANY = 20, 120


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Calls of functions of the core by file and name, in threads that start from now on."""
    found: Calls = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (where := CORE.fullmatch(frame.f_code.co_filename)):
            name = frame.f_code.co_qualname
            if not name.endswith(("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")):
                found[where[1], name] += 1

    before = threading.getprofile()
    threading.setprofile(note)
    yield found
    threading.setprofile(before)


def counted(stack: LocalStack, calls: Calls, num_tokens: int) -> tuple[int, Calls]:
    """Rounds of a generation, and the calls of all of it."""
    calls.clear()
    params = replace(GUMBEL, max_tokens=num_tokens)
    done = stack.client.generate(params=params, prompt_token_ids=[5, 9, 11, 2, 7])
    stack.assert_idle_within(5.0)
    return done.speculation.num_rounds, calls.copy()


def test_a_steady_round_passes_through_the_files_that_the_docs_name(tmp_path: Path, calls: Calls) -> None:
    target, draft = save_target(tmp_path / "target"), save_good_draft(tmp_path / "draft")
    with local_stack(target, draft, coordinator_options={"num_outcomes": "0"}) as stack:
        counted(stack, calls, FEW)  # what is done once
        (few, before), (many, after) = (counted(stack, calls, num) for num in (FEW, MANY))
    a_round = {key: (num - before[key]) / (many - few) for key, num in after.items()}
    a_round = {key: num for key, num in a_round.items() if num >= 0.8}
    assert sum(a_round.values()) <= MOST_CALLS
    assert len(a_round) <= MOST_FUNCTIONS
    described = (ROOT / "docs/architecture.md").read_text().split("## The path of a round\n")[1]
    named = set(re.findall(r"`([\w/]+\.py)`", described.split("\n## ")[0])) - {
        "tests/services/test_round_path.py"
    }
    assert {file for file, _ in a_round} == named
