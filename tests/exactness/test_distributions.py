"""Emitted text follows the target's distribution: the real functions end to end, without models or network.

A "model" is a table of logits by last token. The draft is hostile: its logits are the target's negated,
so most of its guesses are rejected. Every generation starts at the same prompt and emits three tokens;
the distribution of all 16**3 continuations is computed independently, with transformers' own processors where
they exist, and a chi-square test compares it at each position and jointly. A test function raises a
false alarm with probability below 1e-6 over seeds (see tests/support/statistics.py); seeds are fixed.

The negative controls are the mistakes that real engines made. Each must be caught by the same test.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from specwire.core import Outcome, Proposal, Rule, SamplingParams, Verdict
from specwire.rule import acceptance
from specwire.rule.acceptance import accept, accept_by_block, accept_by_rejection
from specwire.rule.columns import Row, Rows
from specwire.rule.random import Purpose, gumbel_noise, uniforms
from specwire.rule.sampling import (
    apply_history,
    apply_warps,
    draw,
    judge_support,
    truncate_support,
)
from specwire.support import Support
from tests.support.parameters import EACH_WARP, warped
from tests.support.statistics import (
    CLEARLY_WRONG,
    FALSE_ALARM_RATE,
    assert_same_distribution,
    sequence_p_values,
)

VOCAB = 16
PROMPT = (3, 9, 3, 12)
NUM_POSITIONS = 3
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(20)) * 1.1
HOSTILE = -TARGET

NUMS_FOR_A_RULE = [6_000, pytest.param(70_000, marks=pytest.mark.slow)]
"""Generations per rule: 18,000 draws, and 210,000."""
NUM_FOR_A_PARAMETER = 2_000
"""Generations per sampling parameter, and per negative control: the p-values of these are below 1e-18."""


pytestmark = pytest.mark.usefixtures("one_thread")


Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Draft tokens [n], then the distribution they are declared to come from: ids, probabilities, lengths."""


class Pair:
    """Draft, target and coordinator in one place, many generations at a time."""

    def __init__(
        self,
        params: SamplingParams,
        draft: torch.Tensor = HOSTILE,
        mass: float = 0.99,
        max_support: int = 1024,
        num_draft_tokens: int = 2,
    ) -> None:
        self.params = params
        self.num_draft_tokens = num_draft_tokens
        self.draft_logits = draft
        self.mass = mass
        self.max_support = max_support
        self.num_drafted = 0
        self.num_accepted = 0

    def generate(self, num: int, first_seed: int = 0) -> np.ndarray:
        """[num, NUM_POSITIONS] tokens; generation i has the seed `first_seed + i`."""
        contexts = [list(PROMPT) for _ in range(num)]
        wanted = len(PROMPT) + NUM_POSITIONS
        while active := [i for i, context in enumerate(contexts) if len(context) < wanted]:
            self.round([contexts[i] for i in active], [first_seed + i for i in active])
        return np.array([context[len(PROMPT) : wanted] for context in contexts])

    def round(self, contexts: list[list[int]], seeds: list[int]) -> None:
        """Draft, verify, commit: extends every context by what its round emits."""
        proposals = self.propose(contexts, seeds)
        verdicts = self.verify(contexts, proposals, seeds)
        for context, seed, proposal, verdict in zip(contexts, seeds, proposals, verdicts, strict=True):
            outcome = self.decide(proposal, verdict, seed)
            self.num_drafted += min(outcome.num_accepted + 1, len(proposal.token_ids))
            self.num_accepted += outcome.num_accepted
            context += [*proposal.token_ids[: outcome.num_accepted], outcome.next_token]

    def propose(self, contexts: list[list[int]], seeds: list[int]) -> list[Proposal]:
        extended = [list(context) for context in contexts]
        supports: list[list[Support]] = [[] for _ in contexts]
        bases = [len(context) for context in contexts]
        for _ in range(self.num_draft_tokens):
            positions = [len(context) for context in extended]
            log_probs = self.log_probs(self.draft_logits, self.params, extended, seeds, positions)
            if self.params.matches_tokens:
                token_ids = self.choose(log_probs, seeds, positions).tolist()
            else:
                coins = torch.from_numpy(self.uniforms(Purpose.DRAFT, seeds, positions, bases))
                sampled, *declared = self.sample(log_probs.exp(), coins)
                token_ids = sampled.tolist()
                for held, support_ids, probs, length in zip(
                    supports, *(x.numpy() for x in declared), strict=True
                ):
                    held.append(Support(support_ids[:length], probs[:length]))
            for context, token_id in zip(extended, token_ids, strict=True):
                context.append(token_id)
        return [
            self.cut(Proposal(len(context), longer[len(context) :], held))
            for context, longer, held in zip(contexts, extended, supports, strict=True)
        ]

    def verify(self, contexts: list[list[int]], proposals: list[Proposal], seeds: list[int]) -> list[Verdict]:
        """All positions of all proposals in one batch, the last one of each with an empty support."""
        histories, support_ids = [], []
        for context, proposal in zip(contexts, proposals, strict=True):
            for i in range(self.num_draft_tokens + 1):
                histories.append([*context, *proposal.token_ids[:i]])
                ids = np.full(VOCAB, -1)
                if i < len(proposal.supports):
                    ids[: len(proposal.supports[i].token_ids)] = proposal.supports[i].token_ids
                support_ids.append(ids)
        positions = [len(history) for history in histories]
        row_seeds = [seed for seed in seeds for _ in range(self.num_draft_tokens + 1)]
        bases = [len(context) for context in contexts for _ in range(self.num_draft_tokens + 1)]
        log_probs = self.log_probs(TARGET, self.target_params(), histories, row_seeds, positions)
        per_proposal = (len(contexts), self.num_draft_tokens + 1)
        if self.params.matches_tokens:
            chosen = self.choose(log_probs, row_seeds, positions).reshape(per_proposal).tolist()
            return [Verdict(p.base_len, ids) for p, ids in zip(proposals, chosen, strict=True)]
        coins = torch.from_numpy(self.uniforms(Purpose.TARGET, row_seeds, positions, bases))
        probs, tail_mass, tails = judge_support(
            log_probs.exp(), torch.from_numpy(np.stack(support_ids)), coins
        )
        return [
            Verdict(
                proposal.base_len,
                token_ids[: len(proposal.token_ids) + 1],
                [
                    probs[: len(s.token_ids)]
                    for probs, s in zip(target_probs, proposal.supports, strict=False)
                ],
                masses[: len(proposal.token_ids)],
            )
            for proposal, token_ids, target_probs, masses in zip(
                proposals,
                tails.reshape(per_proposal).tolist(),
                probs.reshape(*per_proposal, VOCAB).numpy(),
                tail_mass.reshape(per_proposal).tolist(),
                strict=True,
            )
        ]

    @staticmethod
    def log_probs(
        table: torch.Tensor,
        params: SamplingParams,
        contexts: list[list[int]],
        seeds: list[int],
        positions: list[int],
    ) -> torch.Tensor:
        """The warped distribution of a model after each context."""
        logits = table[torch.tensor([context[-1] for context in contexts])]
        if params.needs_history:
            each = zip(contexts, positions, seeds, strict=True)
            rows = [Row(params, len(PROMPT), *rest) for rest in each]
        else:
            rows = [Row(params, len(PROMPT), (), 0, 0)] * len(contexts)
        encoded = Rows.of(rows)
        return apply_warps(apply_history(logits, encoded), encoded)

    def choose(self, log_probs: torch.Tensor, seeds: list[int], positions: list[int]) -> torch.Tensor:
        """The token that greedy decoding or the Gumbel coupling takes."""
        if self.params.greedy:
            return log_probs.argmax(dim=-1)
        noise = gumbel_noise(seeds, positions, VOCAB, device="cpu")
        return (log_probs.double() + noise).argmax(dim=-1)

    # What follows is what the negative controls get wrong.

    def uniforms(
        self, stream: Purpose, seeds: list[int], positions: Sequence[int], bases: list[int]
    ) -> np.ndarray:
        return uniforms(seeds, stream, positions, bases)

    def sample(self, probs: torch.Tensor, coins: torch.Tensor) -> Sampled:
        """See `Sampled`."""
        token_ids, declared, lengths = truncate_support(probs, self.mass, self.max_support)
        slots = draw(declared, coins)[:, None]
        return token_ids.gather(1, slots)[:, 0], token_ids, declared, lengths

    def cut(self, proposal: Proposal) -> Proposal:
        return proposal

    def target_params(self) -> SamplingParams:
        return self.params

    def decide(self, proposal: Proposal, verdict: Verdict, seed: int) -> Outcome:
        return accept(proposal, verdict, self.params, seed)


def reference_distribution(params: SamplingParams) -> np.ndarray:
    """Probabilities of all continuations, [VOCAB] * NUM_POSITIONS, from transformers' classes and numpy."""
    joint = np.ones(())
    contexts = torch.tensor([PROMPT])
    for _ in range(NUM_POSITIONS):
        scores = warped(_penalised(params, contexts, TARGET[contexts[:, -1]]), params)
        probs = torch.softmax(scores.double(), dim=-1).numpy()
        joint = joint[..., None] * probs.reshape(*joint.shape, VOCAB)
        every_token = torch.arange(VOCAB).repeat(len(contexts))[:, None]
        contexts = torch.cat([contexts.repeat_interleave(VOCAB, dim=0), every_token], dim=1)
    return joint


def _penalised(params: SamplingParams, contexts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if params.logit_bias:
        bias = {(token_id,): value for token_id, value in params.logit_bias.items()}
        scores = hf.SequenceBiasLogitsProcessor(bias)(contexts, scores)
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(contexts, scores)
    output = contexts[:, len(PROMPT) :].numpy()
    counts = (output[:, :, None] == np.arange(VOCAB)).sum(axis=1)
    return scores - torch.from_numpy(
        params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
@pytest.mark.parametrize("num", NUMS_FOR_A_RULE)
def test_rejection_sampling_follows_the_target(num: int, rule: Rule) -> None:
    """Half of the draws with the whole vocabulary as support, half with a few tokens and a tail."""
    params, half = SamplingParams(rule=rule), num // 2
    whole, sparse = Pair(params), Pair(params, mass=0.8, max_support=8)
    sequences = np.concatenate([whole.generate(half), sparse.generate(half, first_seed=half)])
    assert_same_distribution(sequences, reference_distribution(params))
    for pair in (whole, sparse):
        assert 0.05 < pair.num_accepted / pair.num_drafted < 0.4, "the draft should be hostile"


@pytest.mark.parametrize("num", NUMS_FOR_A_RULE)
def test_gumbel_coupling_follows_the_target(num: int) -> None:
    params = SamplingParams(rule=Rule.GUMBEL)
    pair = Pair(params)
    assert_same_distribution(pair.generate(num), reference_distribution(params))
    assert 0.01 < pair.num_accepted / pair.num_drafted < 0.35, "the draft should be hostile"


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_rejection_sampling_with_a_friendly_draft(noise: float, rule: Rule) -> None:
    """Most rounds accept everything here, so bonus tokens are tested too."""
    params = SamplingParams(rule=rule)
    generator = torch.Generator().manual_seed(4)
    draft = TARGET + noise * torch.randn(VOCAB, VOCAB, generator=generator)
    pair = Pair(params, draft)
    assert_same_distribution(pair.generate(NUM_FOR_A_PARAMETER), reference_distribution(params), num_tests=2)
    assert pair.num_accepted / pair.num_drafted > 0.75


PARAMETERS = [
    *EACH_WARP,
    {"temperature": 1.8},
    {"top_k": 6},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.2},
    {"logit_bias": {2: 2.0, 9: -3.0, 12: 1.0}},
    {
        "temperature": 0.9,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {3: 1.5},
    },
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("settings", PARAMETERS, ids="+".join)
def test_every_sampling_parameter_follows_the_target(settings: dict[str, Any], rule: Rule) -> None:
    params = SamplingParams(rule=rule, **settings)
    sequences = Pair(params, mass=0.9, max_support=6).generate(NUM_FOR_A_PARAMETER)
    assert_same_distribution(sequences, reference_distribution(params), num_tests=len(PARAMETERS) * len(Rule))


@pytest.mark.parametrize("settings", PARAMETERS, ids="+".join)
def test_greedy_decoding_emits_the_targets_argmax(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings | {"temperature": 0})
    context = list(PROMPT)
    for _ in range(NUM_POSITIONS):
        contexts = torch.tensor([context])
        context.append(int(_penalised(params, contexts, TARGET[contexts[:, -1]]).argmax()))
    for draft in (HOSTILE, TARGET):
        assert (Pair(params, draft).generate(3) == context[len(PROMPT) :]).all()


def test_under_gumbel_coupling_the_draft_never_changes_the_text() -> None:
    params = SamplingParams(rule=Rule.GUMBEL, temperature=0.9, top_p=0.9)
    texts = [Pair(params, draft).generate(300) for draft in (HOSTILE, TARGET, TARGET * 0.5)]
    assert (texts[0] == texts[1]).all()
    assert (texts[0] == texts[2]).all()
    contexts = [list(PROMPT)] * 300
    log_probs = Pair.log_probs(TARGET, params, contexts, list(range(300)), [len(PROMPT)] * 300)
    noise = gumbel_noise(range(300), [len(PROMPT)] * 300, VOCAB, device="cpu")
    assert (texts[0][:, 0] == (log_probs.double() + noise).argmax(dim=-1).numpy()).all()


class GreedyAssistant(Pair):
    """Takes the draft's argmax, yet declares the softmax as the distribution it was sampled from."""

    def sample(self, probs: torch.Tensor, coins: torch.Tensor) -> Sampled:
        token_ids, declared, lengths = truncate_support(probs, self.mass, self.max_support)
        return token_ids[:, 0], token_ids, declared, lengths


class RawProbabilitiesDeclared(Pair):
    """Samples from a truncated distribution, yet declares the one before truncation."""

    def sample(self, probs: torch.Tensor, coins: torch.Tensor) -> Sampled:
        sampled, *_ = Pair(self.params, mass=0.6, max_support=4).sample(probs, coins)
        return sampled, *truncate_support(probs, 1.0, VOCAB)


class NoiseSharedWithResidual(Pair):
    """Draws the recovered token from the number that drew the draft token."""

    coin_streams = Purpose.ACCEPT, Purpose.DRAFT

    def decide(self, proposal: Proposal, verdict: Verdict, seed: int) -> Outcome:
        positions = range(proposal.base_len, proposal.base_len + len(proposal.token_ids))
        base_len = proposal.base_len
        accepting, recovering = (uniforms(seed, stream, positions, base_len) for stream in self.coin_streams)
        return accept_by_rejection(proposal, verdict, accepting, recovering)


class NoiseSharedWithAcceptance(NoiseSharedWithResidual):
    """Flips the coin that drew the draft token."""

    coin_streams = Purpose.DRAFT, Purpose.RESIDUAL


class TemperatureOnOneSide(Pair):
    """The draft is warped by the temperature, the target is not."""

    def target_params(self) -> SamplingParams:
        return replace(self.params, temperature=1.0)


class UnlikelyDraftTokenDropped(Pair):
    """Shortens the draft where the sampled token has a low probability: a look at its own value."""

    def cut(self, proposal: Proposal) -> Proposal:
        for i, (token_id, support) in enumerate(zip(proposal.token_ids, proposal.supports, strict=True)):
            if support.probs[support.token_ids == token_id] < 0.1:
                return Proposal(proposal.base_len, proposal.token_ids[:i], proposal.supports[:i])
        return proposal


class QuantisedAfterSampling(Pair):
    """Declares the draft distribution in steps of 1/8, which is not what was sampled from."""

    def sample(self, probs: torch.Tensor, coins: torch.Tensor) -> Sampled:
        sampled, token_ids, declared, lengths = super().sample(probs, coins)
        coarse = (declared * 8).ceil()
        return sampled, token_ids, coarse / coarse.sum(dim=-1, keepdim=True), lengths


class TruncatedAfterSampling(Pair):
    """Samples from the whole distribution, then declares only its likeliest tokens and the sampled one."""

    def sample(self, probs: torch.Tensor, coins: torch.Tensor) -> Sampled:
        sampled, *_ = super().sample(probs, coins)
        threshold = probs.topk(4, dim=-1).values[:, -1:]
        kept = (probs >= threshold) | (torch.arange(VOCAB) == sampled[:, None])
        return sampled, *truncate_support(probs * kept, 1.0, VOCAB)


FAULTS = [
    GreedyAssistant,
    RawProbabilitiesDeclared,
    NoiseSharedWithResidual,
    NoiseSharedWithAcceptance,
    TemperatureOnOneSide,
    UnlikelyDraftTokenDropped,
    QuantisedAfterSampling,
    TruncatedAfterSampling,
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_negative_controls_are_caught(fault: type[Pair]) -> None:
    params = SamplingParams(temperature=0.8)
    sequences = fault(params).generate(NUM_FOR_A_PARAMETER)
    assert min(sequence_p_values(sequences, reference_distribution(params))) < CLEARLY_WRONG


# --- block verification -----------------------------------------------------------------------------------


class Toy(NamedTuple):
    """Two tokens are possible; the draft prefers the first, by so much in log odds, at every position."""

    tokens: tuple[int, int]
    log_odds: float
    num_draft_tokens: int

    def p_values(self, pair: type[Pair], rule: Rule = Rule.BLOCK) -> list[float]:
        """Of 3,000 generations by this pair: with 2,000 the weakest control is caught by a hair."""
        others = {token_id: -100.0 for token_id in range(VOCAB) if token_id not in self.tokens}
        params = SamplingParams(rule=rule, logit_bias=others)
        draft = torch.zeros(VOCAB, VOCAB)
        draft[:, self.tokens[0]] = self.log_odds
        made = pair(params, draft, num_draft_tokens=self.num_draft_tokens).generate(3_000)
        return sequence_p_values(made, reference_distribution(params))


DECIDED_BY_TOKENS, DECIDED_BY_COINS = Toy((6, 7), 0.62, 3), Toy((6, 0), 3.0, 4)
"""How much is kept depends much on the later draft tokens; or on their coins, as the draft is one-sided."""


class KeyedByPosition(Pair):
    """Draws numbers for one use by position alone, so that they are met again in the next round."""

    stream = Purpose.DRAFT

    def uniforms(
        self, stream: Purpose, seeds: list[int], positions: Sequence[int], bases: list[int]
    ) -> np.ndarray:
        return uniforms(seeds, stream, positions, 0 if stream is self.stream else bases)

    def decide(self, proposal: Proposal, verdict: Verdict, seed: int) -> Outcome:
        positions = range(proposal.base_len, proposal.base_len + len(proposal.token_ids))
        seeds, bases = [seed] * len(positions), [proposal.base_len] * len(positions)
        coins = (self.uniforms(s, seeds, positions, bases) for s in (Purpose.ACCEPT, Purpose.RESIDUAL))
        return accept_by_block(proposal, verdict, *coins)


class CoinsKeyedByPosition(KeyedByPosition):
    stream = Purpose.ACCEPT


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("pair", "toy"), [(KeyedByPosition, DECIDED_BY_TOKENS), (CoinsKeyedByPosition, DECIDED_BY_COINS)]
)
def test_block_verification_by_numbers_of_an_earlier_round_is_caught(pair: type[Pair], toy: Toy) -> None:
    """How many draft tokens are kept depends on the later ones, and on their coins: neither may return."""
    assert min(toy.p_values(pair)) < CLEARLY_WRONG


@pytest.mark.sample(1)
@pytest.mark.parametrize("toy", [DECIDED_BY_TOKENS, DECIDED_BY_COINS])
@pytest.mark.parametrize("rule", [Rule.BLOCK, Rule.REJECTION])
def test_numbers_of_the_round_pass_there(rule: Rule, toy: Toy) -> None:
    p_values = toy.p_values(Pair, rule)
    assert min(p_values) > FALSE_ALARM_RATE / len(p_values)


def _token_residual(proposal: Proposal, verdict: Verdict, i: int, _keep_prob: float) -> np.ndarray:
    return _residual_at(proposal, verdict, i)


def _product_without_min(proposal: Proposal, verdict: Verdict) -> list[float]:
    ratios = [1.0]
    for i in range(len(proposal.token_ids)):
        token_prob_draft, token_prob_target = acceptance._token_probs(proposal, verdict, i)
        ratios.append(ratios[-1] * token_prob_target / token_prob_draft)
    return [min(1.0, ratio) for ratio in ratios]


def _off_by_one(proposal: Proposal, verdict: Verdict) -> list[float]:
    return [1.0, *_keep_probs(proposal, verdict)[:-1]]


_residual_at, _keep_probs = acceptance._residual_at, acceptance._keep_probs


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_residual_at", _token_residual),
        ("_keep_probs", _product_without_min),
        ("_keep_probs", _off_by_one),
    ],
)
def test_a_wrong_block_rule_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]
) -> None:
    """The residual of the token rule; a product of ratios cut at the end only; one position too far."""
    monkeypatch.setattr(acceptance, name, fault)
    assert min(DECIDED_BY_COINS.p_values(Pair)) < CLEARLY_WRONG
