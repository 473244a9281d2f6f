"""The chosen number of draft tokens in the running system (`unit/test_choice.py` has how), and the rule."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.length.choice import Among, SharedChoice
from coordinator.length.ways import Way
from specwire import InvalidRequestError, Rule, SamplingParams
from specwire.cli import drafts
from specwire.config.client import ClientConfig
from specwire.config.link import Link
from tests.support.harness import local_stack
from tests.support.pairs import save_target

CHOSEN = {"num_draft_tokens": "auto"}


@pytest.mark.serial
@pytest.mark.slow
def test_the_running_system_finds_a_good_number() -> None:
    """Emulated devices, over real gRPC: near the best fixed number, and far above plain decoding."""
    with local_stack(
        "emulated:step_ms=30", "emulated:step_ms=2,alpha=0.8", coordinator_options=CHOSEN
    ) as stack:

        def tokens_per_s(num_draft_tokens: int | None, seed: int) -> float:
            params = SamplingParams(
                max_tokens=90, seed=seed, rule=Rule.GUMBEL, num_draft_tokens=num_draft_tokens
            )
            done = stack.client.generate(params=params, prompt_token_ids=[1])
            return 90e3 / done.timing.total_ms

        for seed in range(3):
            tokens_per_s(None, seed)  # with the first trials
        runs = [
            (tokens_per_s(6, seed), tokens_per_s(None, seed), tokens_per_s(0, seed)) for seed in (10, 11, 12)
        ]
    best, chosen, plain = np.array(runs).T
    assert np.median(chosen / best) > 0.8
    assert np.median(chosen / plain) > 1.5


def test_the_choice_with_other_numbers_of_streams() -> None:
    """A pass with 64 streams is shared by 64 times as many draft tokens, which cost here."""
    draft = "emulated:step_ms=0.5,alpha=0.8"
    with local_stack("emulated:step_ms=10,token_us=2500", draft, coordinator_options=CHOSEN) as stack:
        params = SamplingParams(max_tokens=60, rule=Rule.GUMBEL)
        for _ in range(3):
            stack.client.generate(params=params, prompt_token_ids=[1])
        few, many = stack.client.get_status(if_num_streams=[1, 64]).choices
        assert (few.num_streams, many.num_streams) == (1, 64)
        for choice in (few, many):
            rates = [way.expected_tokens_per_s for way in choice.ways]
            assert rates == sorted(rates, reverse=True)
            assert [way.is_chosen for way in choice.ways].index(True) == 0
        assert few.ways[0].expected_tokens_per_s > 4 * many.ways[0].expected_tokens_per_s
        assert not stack.client.get_status().choices
        for asked in ([0], [1] * 65, [1 << 20]):
            with pytest.raises(InvalidRequestError, match=r"if_num_streams=.*: must be at most 64 numbers"):
                stack.client.get_status(if_num_streams=asked)


def test_no_round_is_drawn_twice_where_the_length_follows_from_what_was_learned() -> None:
    """Under rejection, a chosen length that had seen the very same draws before would know how they end."""
    with local_stack(
        "emulated:step_ms=0", "emulated:step_ms=0,alpha=0.8", coordinator_options=CHOSEN
    ) as stack:

        def token_ids(num_draft_tokens: int | None, rule: Rule) -> tuple[int, ...]:
            params = SamplingParams(max_tokens=40, seed=5, rule=rule, num_draft_tokens=num_draft_tokens)
            return stack.client.generate(params=params, prompt_token_ids=[1]).token_ids

        assert token_ids(None, Rule.REJECTION) != token_ids(None, Rule.REJECTION)
        assert token_ids(3, Rule.REJECTION) == token_ids(3, Rule.REJECTION)
        assert token_ids(None, Rule.GUMBEL) == token_ids(None, Rule.GUMBEL)


def test_where_drafting_does_not_pay_completions_status_and_log_say_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A draft step takes as long as two passes, and hardly a token is accepted: trials find that out."""
    options = {**CHOSEN, "num_outcomes": "0"}
    reason = r"does not pay here: a proposal takes \d+\.\d of a pass, \d\.\d of its tokens are accepted"
    with (
        caplog.at_level(logging.INFO),
        local_stack(
            "emulated:step_ms=4", "emulated:step_ms=8,alpha=0.1", coordinator_options=options
        ) as stack,
    ):

        def whys() -> tuple[str, str]:
            """Of a completion, and of the status after it."""
            done = stack.client.generate(params=SamplingParams(max_tokens=60, seed=1), prompt_token_ids=[1])
            return done.speculation.why_plain, stack.client.get_status().why_plain

        assert any(all(re.match(reason, why) for why in whys()) for _ in range(20))
        whys()  # and plain decoding is measured
        ways = {way.name: way for way in stack.client.get_status().ways}
        best = max(ways.values(), key=lambda way: way.expected_tokens_per_s)
        assert best.name == "plain"
        ratio = ways["plain"].measured_tokens_per_s / best.expected_tokens_per_s
        assert 0.3 < ratio < 3  # of a block before, on a machine that others use
        assert {"chains", "trees of 32"} < ways.keys()
        assert not any(name.endswith("prepared") for name in ways), "--num-outcomes 0"
        shown = drafts.show(ClientConfig(server=stack.address), colour=False)
        assert re.search(r"\ntokens/s of a stream +chosen +expected +last measured\nplain ", shown)
        assert "\n\nDecoded plainly: does not pay here: " in shown
    hints = [record.getMessage() for record in caplog.records if "decoded plainly" in record.getMessage()]
    assert len(hints) == 1
    assert re.match(f"drafting {reason}", hints[0])


@pytest.mark.parametrize("takes_turns", [True, False])
def test_models_on_the_same_cores_prepare_nothing_by_themselves(
    takes_turns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what both say of themselves. A paced target leaves the cores to the draft, which works ahead."""
    target = save_target(tmp_path / "target")
    begin_round, num_outcomes = SharedChoice.begin_round, []

    def noted(self: SharedChoice, among: Among) -> tuple[Way, int]:
        way, num = begin_round(self, among)
        num_outcomes.append(num)
        return way, num

    monkeypatch.setattr(SharedChoice, "begin_round", noted)
    pace = {"least_pass_ms": 0.0 if takes_turns else 1.0}
    with local_stack(target, target, verify_options=pace) as stack:
        params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
        for _ in range(3 if takes_turns else 50):  # what is best at once, or is tried
            stack.client.generate(params=params, prompt_token_ids=[3, 1, 4])
            if any(num_outcomes):
                break
        assert any(num_outcomes) is not takes_turns
        infos = stack.client.get_model_info()
        assert infos[1] is not None
        assert infos[1].is_beside(infos[0])
        assert infos[1].takes_turns_with(infos[0]) is takes_turns


# --- the rule of a request that names none ---------------------------------------------------------------

TARGET = "emulated:step_ms=10"
DRAFT = "emulated:step_ms=1,alpha=0.8,runner_up=0.55"
PROMPT = [1, 2, 3]
PREPARING = {"num_draft_tokens": "3", "num_outcomes": "16"}


def rules(*params: SamplingParams, options: dict[str, Any], rtt_ms: float = 0.0) -> list[Rule]:
    """Of generations, one after the other."""
    link = Link(rtt_ms=rtt_ms) if rtt_ms else None
    with local_stack(TARGET, DRAFT, coordinator_options=options, draft_link=link) as stack:
        return [stack.client.generate(params=each, prompt_token_ids=PROMPT).rule for each in params]


@pytest.mark.parametrize(("rule", "other"), [*zip(Rule, [*Rule][1:] + [*Rule][:1], strict=True)])
def test_what_a_request_names_holds_and_otherwise_what_the_server_was_told(rule: Rule, other: Rule) -> None:
    free = SamplingParams(max_tokens=8, seed=3)
    assert rules(free, replace(free, rule=other), options={"rule": rule.value}) == [rule, other]


def test_a_seed_fixes_the_text() -> None:
    assert rules(SamplingParams(max_tokens=8, seed=3), options={}) == [Rule.GUMBEL]


@pytest.mark.slow
def test_a_far_draft_is_coupled_once_that_is_known() -> None:
    free = SamplingParams(max_tokens=60)
    assert rules(free, free, options=PREPARING, rtt_ms=40) == [Rule.BLOCK, Rule.GUMBEL]
    lockstep = PREPARING | {"num_outcomes": "0"}
    assert rules(free, free, options=lockstep, rtt_ms=40) == [Rule.BLOCK, Rule.BLOCK]
