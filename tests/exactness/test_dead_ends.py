"""Where no token can follow: a grammar that needs a text which no token has, or logits that are no numbers.

A request ends there with the same error, drafted or not, after the tokens that plain decoding emits.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import regex
from scipy import stats

from specwire import Completion, FinishReason, Grammar, InvalidRequestError, Rule, SamplingParams
from specwire.core import NO_TOKEN, Proposal, Verdict
from specwire.proposals import chains
from specwire.rule.acceptance import accept
from specwire.rule.random import Purpose, uniform
from specwire.support import Support
from tests.support.harness import LocalStack, local_stack
from tests.support.languages import save_speakers
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE

DRAFT, TARGET = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.2, 0.3])
LAST = 2
"""Nothing follows this token."""
NUM, LENGTH = 2_000, 3


def drawn(probs: np.ndarray, number: float) -> int:
    return int(np.searchsorted(probs.cumsum(), number * probs.sum(), side="right"))


def proposal(params: SamplingParams, seed: int, base: int) -> Proposal:
    num_chains = 2 if params.rule is Rule.KSEQ else 1
    token_ids = [
        [drawn(DRAFT, uniform(seed, Purpose.DRAFT, base + i, base, chain)) for i in range(LENGTH)]
        for chain in range(num_chains)
    ]
    supports = [[Support(np.arange(3), DRAFT.astype(np.float32))] * LENGTH] * num_chains
    if num_chains > 1:
        return chains.merged(token_ids, supports, base)
    return Proposal(base, token_ids[0], supports[0])


def verdict(made: Proposal, seed: int) -> Verdict:
    """Nothing follows the last token, and nothing is known of rows that are never reached."""
    parents = made.parents or range(-1, len(made.token_ids) - 1)
    after = [-1, *made.token_ids]
    is_dead = [False]
    for node, parent in enumerate(parents):
        is_dead.append(is_dead[parent + 1] or after[node + 1] == LAST)
    bonus = drawn(TARGET, uniform(seed, Purpose.TARGET, made.base_len + LENGTH, made.base_len))
    token_ids = [NO_TOKEN if dead else bonus for dead in is_dead]
    probs = [np.full(3, np.nan if dead else 1.0, np.float32) * TARGET.astype(np.float32) for dead in is_dead]
    return Verdict(made.base_len, token_ids, probs[: len(made.supports)], [0.0] * len(made.supports))


def generated(params: SamplingParams, seed: int) -> tuple[int, ...]:
    """At most three tokens, up to the one that nothing follows."""
    tokens: list[int] = []
    while len(tokens) < LENGTH and LAST not in tokens:
        made = proposal(params, seed, 1 + len(tokens))
        outcome = accept(made, verdict(made, seed), params, seed)
        tokens += [*(made.token_ids[node] for node in outcome.path), outcome.next_token]
        assert LAST not in tokens[:-1]
    return tuple(tokens[:LENGTH])


def p_value(params: SamplingParams) -> float:
    found = Counter(generated(params, seed) for seed in range(NUM))
    expected: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 1.0}
    while open_ones:
        tokens, mass = open_ones.popitem()
        ended = len(tokens) == LENGTH or LAST in tokens
        more = {(*tokens, token): mass * float(TARGET[token]) for token in range(3)}
        (expected if ended else open_ones).update({tokens: mass} if ended else more)
    assert set(found) <= set(expected)
    counts = [found[tokens] for tokens in expected]
    return float(stats.chisquare(counts, [NUM * mass for mass in expected.values()]).pvalue)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.KSEQ])
def test_texts_up_to_a_dead_end_follow_the_target(rule: Rule) -> None:
    assert p_value(SamplingParams(rule=rule)) > FALSE_ALARM_RATE


def test_draft_tokens_that_are_dropped_for_what_follows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a control, a draft token before a dead end is left out."""
    whole = proposal

    def cautious(params: SamplingParams, seed: int, base: int) -> Proposal:
        made = whole(params, seed, base)
        return made.first(made.token_ids.index(LAST) if LAST in made.token_ids else LENGTH)

    monkeypatch.setitem(globals(), "proposal", cautious)
    assert p_value(SamplingParams(rule=Rule.REJECTION)) < CLEARLY_WRONG


# --- over the wire --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    options = {"num_draft_tokens": "4", "num_outcomes": "0"}
    pair = save_speakers(tmp_path_factory.mktemp("speakers"), 0.9)
    with local_stack(*pair, coordinator_options=options) as running:
        yield running


def expression(rng: random.Random, depth: int = 3) -> str:
    """A regular expression over letters of the tokens, and one that no token has."""
    if depth == 0:
        return "".join(rng.choices("abcdz", [6, 6, 6, 6, 1], k=rng.randint(1, 3)))
    kind = rng.choice("sar")
    if kind == "r":
        return f"({expression(rng, depth - 1)}){{{rng.randint(0, 1)},{rng.randint(2, 3)}}}"
    parts = [expression(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    return "".join(parts) if kind == "s" else f"({'|'.join(parts)})"


def ending(stack: LocalStack, params: SamplingParams) -> Completion | str:
    try:
        return stack.client.generate(params=params, prompt_token_ids=[3])
    except InvalidRequestError as error:
        return str(error)


def check(stack: LocalStack, text: str, seed: int) -> Counter[str]:
    """All rules, drafted and not: every text matches, and what is matched is as without drafts."""
    found: Counter[str] = Counter()
    kinds: Sequence[dict[str, Any]] = (
        {"temperature": 0.0},
        {"rule": Rule.GUMBEL},
        {"rule": Rule.GUMBEL, "max_depth": 3, "num_draft_tokens": 8},
        {"rule": Rule.REJECTION},
        {"rule": Rule.BLOCK},
        {"rule": Rule.REJECTION, "draft": "ngram"},
    )
    for kind in kinds:
        params = SamplingParams(seed=seed, max_tokens=16, grammar=Grammar(regex=text), **kind)
        plain = SamplingParams(
            **{k: v for k, v in kind.items() if k in ("temperature", "rule")},
            seed=seed,
            max_tokens=16,
            grammar=Grammar(regex=text),
            num_draft_tokens=0,
        )
        ends = ending(stack, params), ending(stack, plain)
        for done in ends:
            if isinstance(done, str):
                assert "no token of the vocabulary goes on with the output" in done
                found["dead end"] += 1
                continue
            is_partial = done.finish_reason is not FinishReason.STOP
            assert regex.fullmatch(text, done.text, partial=is_partial), (text, done.text, params)
            found["partial" if is_partial else "whole"] += 1
        if params.matches_tokens:
            drafted, alone = (each if isinstance(each, str) else each.token_ids for each in ends)
            assert drafted == alone, (text, params)
    return found


@pytest.mark.parametrize("num", [2, pytest.param(80, marks=pytest.mark.slow)])
def test_random_grammars_with_dead_ends(stack: LocalStack, num: int) -> None:
    rng, found = random.Random(2), Counter[str]()
    for seed in range(num):
        found += check(stack, f"({expression(rng)}){{1,2}}", seed)
    assert min(found["dead end"], found["whole"]) > num / 2, found


def test_a_text_that_always_meets_its_dead_end(stack: LocalStack) -> None:
    for seed in range(2):
        assert check(stack, "(ab|ba){3}z", seed).keys() == {"dead end"}
