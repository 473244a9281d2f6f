"""Requests with a grammar through real services: what is refused, and what goes on in mid-text.

A sampled proposal is waited for as long as its masks may take, which its tokens decide.

`tests/exactness/test_structured.py` has the distributions.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coordinator.assembly
from coordinator.generation import Plan
from coordinator.length.planners import AdaptiveLength
from coordinator.peers import drafter
from coordinator.peers.draft_sequence import DraftSequence
from coordinator.peers.replicas import Replica
from specwire import (
    AsyncClient,
    FinishReason,
    Grammar,
    InvalidRequestError,
    ResourceExhaustedError,
    Rule,
    SamplingParams,
    UnsupportedError,
)
from specwire.config.link import Link
from specwire.engine.grammars.matcher import GrammarMatcher
from specwire.rpc.wire.model import sampling_to_proto
from specwire.rpc.wire.verify import VerifyOrder
from specwire.v1 import verify_pb2
from tests.support.harness import LocalStack, local_stack
from tests.support.languages import REGEX, TEXTS, allowed, save_speaker, save_speakers
from tests.support.markov_distribution import PROMPT
from tests.support.model_streams import SequenceFailedError, opening, raw_stream, verify
from tests.support.pairs import markov_logits, markov_model
from tests.support.processes import wait_until

GRAMMAR = Grammar(regex=REGEX)
GREEDY = SamplingParams(temperature=0, rule=Rule.REJECTION, seed=1, grammar=GRAMMAR)
AMBIGUOUS = 'root ::= s "z"\ns ::= s s s s s s | [a-c]'
"""Each text has exponentially many derivations."""
MANY_OPTIONAL = {"type": "object", "properties": {f"key {i}": {"type": "string"} for i in range(900)}}
"""Every name may follow every one before it."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_speakers(tmp_path_factory.mktemp("speakers"), 0.7, 3)


def asked(output: Sequence[int]) -> verify_pb2.VerifyRequest:
    """A sequence that begins after this output, as for a replica that takes over."""
    opened = opening(sampling=sampling_to_proto(GREEDY), prompt_len=len(PROMPT))
    return verify(VerifyOrder(1, 1, 0, [*PROMPT, *output]), opened=[opened])


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_enough", [True, False])
def test_grammars_are_compiled_without_torch_where_that_works(is_enough: bool) -> None:
    """It is what a first grammar would wait for; a version of xgrammar that needs more of it gets it."""
    code = (
        "import sys\n"
        "from specwire.engine.grammars import helper\n"
        f"if not {is_enough}: helper._Unused.__getattr__ = None\n"
        "compiler = helper._compiler(helper.GrammarVocabulary([b'a', None], 2, (1,)))\n"
        "assert not helper._compile(compiler, 'regex', 'a+').problem\n"
        "print('torch._C' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(not is_enough)


@pytest.mark.slow
def test_a_replica_goes_on_in_mid_text(stack: LocalStack) -> None:
    """The tokens alone say where the grammar is."""
    logits, rng = markov_logits(markov_model()), random.Random(0)
    output: list[int] = []
    for _ in range(12):
        choices = allowed(output).nonzero()[0].tolist()
        scores = logits[[*PROMPT, *output][-1]].clone()
        scores[~torch.from_numpy(allowed(output))] = -torch.inf
        with raw_stream(stack, "verify") as stream:
            response = stream.ask(asked(output))
        assert np.frombuffer(response.target_token_ids, "<i4").tolist() == [int(scores.argmax())]
        output.append(rng.choice(choices))


def test_an_output_that_does_not_match_ends_its_sequence(stack: LocalStack) -> None:
    wrong = [TEXTS.index("ab"), TEXTS.index("aa")]
    with raw_stream(stack, "verify") as stream, pytest.raises(SequenceFailedError) as failed:
        stream.ask(asked(wrong))
    assert "does not match the grammar, as token 1 of the output" in str(failed.value.error)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"grammar": Grammar(regex="(a")}, InvalidRequestError, "grammar.regex"),
    ({"grammar": Grammar(regex="(?=a)b")}, InvalidRequestError, "grammar.regex"),
    ({"grammar": Grammar(ebnf='root ::= "a" other')}, InvalidRequestError, "grammar.ebnf"),
    ({"grammar": GRAMMAR, "ignore_eos": True}, UnsupportedError, "ignore_eos"),
    ({"grammar": GRAMMAR, "min_tokens": 3}, UnsupportedError, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "kind", "name"), REFUSED)
def test_what_is_refused(stack: LocalStack, fields: dict[str, Any], kind: type[Exception], name: str) -> None:
    with pytest.raises(kind) as refusal:
        stack.client.generate(params=SamplingParams(**fields), prompt_token_ids=PROMPT)
    assert refusal.value.field == name  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_grammar_that_is_slow_to_match_ends_its_own_request(stack: LocalStack) -> None:
    """When it is compiled, or where its text has become too long for it."""
    params = SamplingParams(grammar=Grammar(ebnf=AMBIGUOUS), max_tokens=1000, seed=1)
    with pytest.raises((InvalidRequestError, ResourceExhaustedError), match=r"to match|over 20"):
        stack.client.generate(params=params, prompt_token_ids=PROMPT)


def test_a_target_without_a_tokenizer_constrains_nothing() -> None:
    with (
        local_stack("emulated:step_ms=0", None) as emulated,
        pytest.raises(UnsupportedError, match="grammar=regex"),
    ):
        emulated.client.generate(params=SamplingParams(grammar=GRAMMAR), prompt_token_ids=PROMPT)


def test_counted_repetition_within_repetition_is_small(stack: LocalStack) -> None:
    params = SamplingParams(grammar=Grammar(regex="(a{1000}){1000}"), max_tokens=40, seed=1)
    done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert set(done.text) == {"a"}
    assert done.finish_reason is FinishReason.LENGTH


def test_log_probabilities_are_those_before_the_grammar(stack: LocalStack) -> None:
    params = SamplingParams(grammar=GRAMMAR, max_tokens=8, seed=2, logprobs=0)
    done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    rows = torch.log_softmax(markov_logits(markov_model()), dim=-1)
    before = [*PROMPT, *done.token_ids]
    for last, token in zip(before, done.tokens, strict=False):
        assert token.logprob == pytest.approx(float(rows[last, token.token_id]), abs=1e-4)


@pytest.mark.slow
def test_other_streams_go_on_while_a_grammar_takes_too_much(stack: LocalStack) -> None:
    """It is compiled in a process of its own, at the lowest priority, until its limit."""

    async def gaps(client: AsyncClient, until: asyncio.Event) -> list[float]:
        found: list[float] = []
        while not until.is_set():
            params = SamplingParams(grammar=GRAMMAR, seed=len(found), num_draft_tokens=2)
            last_s = time.perf_counter()
            async with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
                async for _ in stream:
                    now_s = time.perf_counter()
                    found.append(now_s - last_s)
                    last_s = now_s
        return found

    async def both() -> tuple[list[float], float]:
        async with AsyncClient(stack.address) as client:
            # Target and draft have compiled theirs when the other one comes: they compile one at a time.
            own = SamplingParams(grammar=GRAMMAR, num_draft_tokens=2)
            await client.generate(params=own, prompt_token_ids=PROMPT)
            until = asyncio.Event()
            reading = asyncio.create_task(gaps(client, until))
            started_s = time.perf_counter()
            params = SamplingParams(grammar=Grammar(json_schema=MANY_OPTIONAL))
            with pytest.raises(InvalidRequestError, match="takes more than 5 s or 1024 MiB to compile"):
                await client.generate(params=params, prompt_token_ids=PROMPT)
            took_s = time.perf_counter() - started_s
            until.set()
            return await reading, took_s

    found, took_s = asyncio.run(both())
    print(f"refused after {took_s:.1f} s; {len(found)} gaps, longest {max(found) * 1e3:.0f} ms")
    assert took_s < 60
    assert max(found) < 2


@pytest.mark.slow
def test_a_draft_with_another_vocabulary_is_masked_too(tmp_path: Path) -> None:
    """In the target's tokens, after translation."""
    target = save_speaker(markov_model(), tmp_path / "target")
    other = (TEXTS[0], *TEXTS[:0:-1])
    draft = save_speaker(markov_model(0.7), tmp_path / "draft", other)
    config = json.dumps({"method": "draft_model", "use_heterogeneous_vocab": True})
    with local_stack(
        target,
        draft,
        draft_options={"target_tokenizer": str(target)},
        coordinator_options={"speculative_config": config},
    ) as running:
        for rule in (Rule.GUMBEL, Rule.BLOCK):
            params = SamplingParams(grammar=GRAMMAR, rule=rule, seed=1, num_draft_tokens=3, max_tokens=60)
            done = running.client.generate(params=params, prompt_token_ids=PROMPT)
            assert re.fullmatch(REGEX, done.text)
            assert done.speculation.num_draft_tokens > 0


# --- proposals that wait for their masks ---------------------------------------------------------------


class Impatient(AdaptiveLength):
    """Would wait for nothing."""

    def plan(self) -> Plan:
        return Plan(2, patience_s=0.0)


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: masks take 100 ms from now on."""
    fill = GrammarMatcher.fill

    def slowly(self: GrammarMatcher, *arguments: Any) -> Any:
        time.sleep(0.1)
        return fill(self, *arguments)

    monkeypatch.setattr(coordinator.assembly, "AdaptiveLength", Impatient)
    return lambda: monkeypatch.setattr(GrammarMatcher, "fill", slowly)


OPTIONS = {"num_draft_tokens": "auto", "num_outcomes": "0", "draft_timeout_ms": 10.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.GUMBEL])
def test_slow_masks_make_no_proposal_late(
    pair: tuple[Path, Path], slow_masks: Callable[[], None], rule: Rule
) -> None:
    """Neither for the plan nor for the time-out; where tokens are matched both may end the wait."""
    params = SamplingParams(rule=rule, seed=1, max_tokens=8, grammar=Grammar(regex=REGEX))
    with local_stack(*pair, coordinator_options=OPTIONS) as stack:
        generate = partial(stack.client.generate, params=params, prompt_token_ids=[3])
        generate()  # the draft is proven, the grammar compiled
        slow_masks()
        done = generate().speculation
    num_drafted = sum(source.num_drafts for source in done.by_source)
    num_possible = done.num_rounds - 1  # of the last token there may be no draft
    assert (num_drafted >= num_possible) is not params.matches_tokens, done


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.GUMBEL])
def test_no_late_proposal_is_kept(
    pair: tuple[Path, Path], slow_masks: Callable[[], None], monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    """Neither past the longest wait, nor from a draft that has not answered since it was lost."""
    num_late, received = [0, 0], DraftSequence.received

    def noted(self: DraftSequence, answer: Any, num_bytes: int) -> None:
        num_late[bool(answer.proposal.token_ids)] += self.error is None and self.late_s > 0
        received(self, answer, num_bytes)

    monkeypatch.setattr(DraftSequence, "received", noted)
    params = SamplingParams(rule=rule, seed=1, max_tokens=8, grammar=Grammar(regex=REGEX))
    options = OPTIONS | {"draft_timeout_ms": 60.0}
    with local_stack(*pair, coordinator_options=options, draft_link=Link()) as stack:
        generate = partial(stack.client.generate, params=params, prompt_token_ids=[3])
        generate()
        slow_masks()
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "LONGEST_MASK_S", 0.01)
            patch.setattr(Replica, "longest_s", lambda *_: 0.0)
            reason = generate().speculation.draft_unavailable
        assert params.matches_tokens or "no proposal within" in reason
        assert stack.draft_proxy is not None
        stack.draft_proxy.cut()
        num_late[0] = 0
        wait_until(lambda: bool(generate() and sum(num_late)), 30.0)
    assert (num_late[1] > 0) is params.matches_tokens
