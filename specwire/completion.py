"""What a client receives of a generation: tokens, chunks and the completion. No torch, no grpc, no I/O."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

from specwire.core import Fate, Rule


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token, as clients receive it.

    Attributes:
        token_id: its id.
        text: what it adds to the text; empty while a character is incomplete.
        fate: accepted, rejected, recovered, bonus or plain.
        source: what proposed it, a draft model's name or a method of the coordinator's own; empty for the
            target's own tokens.
        logprob: under the target, in nats, if requested.
        top_logprobs: token id and log probability of the likeliest alternatives, best first.
    """

    token_id: int
    text: str
    fate: Fate
    source: str = ""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTree:
    """The draft tokens of one round, and which of them were accepted. A chain is a tree of one branch.

    Attributes:
        source: what proposed them, as `Token.source`.
        token_ids: [num_draft_tokens], parents before children; none in a plain round.
        texts: [num_draft_tokens], of each token decoded alone.
        parents: [num_draft_tokens] index of each token's parent, -1 for the prefix; empty for a chain.
        path: indices of the accepted tokens, in order. The round emitted these, and then a token of the
            target's own.
    """

    source: str
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What one round adds to a streamed generation, or several where the client is slower than they are.

    Attributes:
        text: new text; complete characters only, never part of a stop string.
        tokens: the emitted tokens whose text is in `text`, in order.
        rejected: draft tokens that were rejected, for display.
        first_index: index of `tokens[0]` in the output, from 0.
        speculation, timing: of the generation so far, if progress was requested.
        held: tokens of the round whose text is incomplete; a later chunk has them in `tokens`.
        tree: draft tokens of the last round, if progress was requested.
        prompt: the next tokens of the prompt, if their log probabilities were requested; all of these come
            before the first of `tokens`, and the first one has no log probability.
    """

    text: str
    tokens: tuple[Token, ...]
    rejected: tuple[Token, ...] = ()
    first_index: int = 0
    speculation: Speculation | None = None
    timing: Timing | None = None
    held: tuple[Token, ...] = ()
    tree: DraftTree | None = None
    prompt: tuple[Token, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """Ids of the emitted tokens."""
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """One of the texts that a beam search has found.

    Attributes:
        text: without special tokens.
        token_ids: all of its tokens, including the one that ended it.
        score: sum of their log probabilities under the target (nats), divided by length ** length_penalty.
        finish_reason: why it ended.
        stop_reason: the token that ended it, if one did.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeInfo:
    """What determines a generation besides its request, for the coordinator that resumes it.

    Attributes:
        seed, rule: as in the completion.
        context_digest: of the target, its tokenizer, and the prompt as token ids.
    """

    seed: int
    rule: Rule
    context_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts of one generation.

    Attributes:
        prompt_tokens: of the prompt, after encoding.
        completion_tokens: emitted.
        cached_tokens: prompt tokens found in the target's prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """Counts of the proposals of one source.

    Attributes:
        source: a draft model's name, or a method of the coordinator's own.
        num_drafts: rounds that had draft tokens of it.
        num_draft_tokens: of these rounds, verified.
        num_accepted_tokens: of these, accepted.
    """

    source: str
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def plus(self, num_draft_tokens: int, num_accepted_tokens: int, num_drafts: int = 1) -> SourceCounts:
        """With more rounds."""
        return SourceCounts(
            source=self.source,
            num_drafts=self.num_drafts + num_drafts,
            num_draft_tokens=self.num_draft_tokens + num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + num_accepted_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """Counts of speculation in one generation.

    Attributes:
        num_rounds: verify passes, including those without draft tokens.
        num_tokens: that these rounds have added to the output; of a beam search, to each beam.
        num_draft_tokens: draft tokens verified.
        num_accepted_tokens: of these, accepted.
        acceptance_histogram: [k] is the number of rounds with a draft that accepted exactly k tokens.
        drafted_per_position, accepted_per_position: counts at draft position i (0-based).
        draft_unavailable: why the draft was unavailable for a part of the generation; empty if it was not.
        num_prepared: rounds whose proposal was prepared before the previous round ended.
        by_source: the counts of each source, in the order of their first proposals.
        why_plain: why most rounds had no draft tokens; empty if most had some.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    draft_unavailable: str = ""
    num_prepared: int = 0
    by_source: tuple[SourceCounts, ...] = ()
    why_plain: str = ""

    @property
    def num_drafts(self) -> int:
        """Rounds that had draft tokens."""
        return sum(self.acceptance_histogram)

    @property
    def hit_rate(self) -> float:
        """Fraction of the rounds with a draft whose proposal was prepared; 0 without any."""
        return self.num_prepared / self.num_drafts if self.num_drafts else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens that a round of any kind added: `num_tokens` over `num_rounds`."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per round with a draft, including the recovered or bonus token; 1 without any.

        Rounds without draft tokens do not count, as they do in `tokens_per_round`.
        """
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the counts, and the means that follow from them."""
        return _fields(self) | {
            "tokens_per_round": round(self.tokens_per_round, 4),
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "draft_acceptance_rate": round(self.draft_acceptance_rate, 4),
        }


class Stage(enum.StrEnum):
    """What a generation spends its time on; each moment belongs to one stage.

    Attributes:
        number: its place among the stages.
    """

    number: int

    def __init__(self, _: str) -> None:
        self.number = len(type(self).__members__)

    ADMISSION = "admission"
    """Waiting for a slot."""
    DRAFT = "draft"
    """Waiting for the draft service while it drafts, or until it is not waited for any more."""
    DRAFT_QUEUE = "draft_queue"
    """Waiting in the draft service, for passes of others."""
    DRAFT_NETWORK = "draft_network"
    """On the way to the draft service and back; gRPC and waking up at both ends included."""
    VERIFY = "verify"
    """Waiting for the verify service while it computes."""
    VERIFY_QUEUE = "verify_queue"
    """Waiting in the verify service, for passes of others."""
    VERIFY_NETWORK = "verify_network"
    """On the way to the verify service and back; gRPC and waking up at both ends included."""
    RULE = "rule"
    """The accept rule in the coordinator."""
    EMIT = "emit"
    """Text, stop conditions, and handing messages to the transport."""
    CLIENT_CREDIT = "client_credit"
    """Waiting for the client to read or to acknowledge."""
    FAILOVER = "failover"
    """Calls that were lost, and the search for other services."""
    COORDINATOR = "coordinator"
    """The rest of the coordinator: checking and encoding the request, planning, its event loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Where the time of one generation went, in milliseconds, from the arrival of its request.

    Attributes:
        total_ms: the sum of all stages.
        time_to_first_token_ms: to the first emitted token.
        admission_ms, ..., coordinator_ms: see `Stage`.
        ahead_ms: what the draft computed before it was asked, while other stages ran; not a stage.
    """

    total_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    admission_ms: float = 0.0
    draft_ms: float = 0.0
    draft_queue_ms: float = 0.0
    draft_network_ms: float = 0.0
    verify_ms: float = 0.0
    verify_queue_ms: float = 0.0
    verify_network_ms: float = 0.0
    rule_ms: float = 0.0
    emit_ms: float = 0.0
    client_credit_ms: float = 0.0
    failover_ms: float = 0.0
    coordinator_ms: float = 0.0
    ahead_ms: float = 0.0

    def of(self, *stages: Stage) -> float:
        """The sum of these stages, in milliseconds."""
        return float(sum(getattr(self, f"{stage}_ms") for stage in stages))

    @property
    def stages(self) -> dict[Stage, float]:
        """Every stage with its time, in milliseconds."""
        return {stage: self.of(stage) for stage in Stage}

    @property
    def network_ms(self) -> float:
        """On the way to both services and back."""
        return self.of(Stage.DRAFT_NETWORK, Stage.VERIFY_NETWORK)

    @property
    def queue_ms(self) -> float:
        """Waiting in both services, for passes of others."""
        return self.of(Stage.DRAFT_QUEUE, Stage.VERIFY_QUEUE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished generation.

    Of a resumed generation, `speculation`, `timing` and `usage.cached_tokens` cover the part after the last
    resume; all else covers the whole.

    Attributes:
        text: the output, without stop string or special tokens.
        token_ids: all emitted tokens, including the one that ended it.
        finish_reason: why it ended.
        stop_reason: the stop string or token id that ended it, if one did.
        seed: fixes all random choices of this generation.
        rule: verification rule of this generation.
        reproducible: whether the same request gives the same text, with any draft and under any load: tokens
            were matched, and the target is batch-invariant. Else rounding may decide between tokens of nearly
            equal probability.
        why_not_reproducible: what it lacks for that, for people; empty where it is reproducible.
        tokens: the emitted tokens with their fates and log probabilities.
        num_resumes: how often it was resumed, at another coordinator or the same one.
        hypotheses: of a beam search, the best texts, best first; the first one is the completion's own.
        prompt: the tokens of the prompt with their log probabilities, if these were requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    speculation: Speculation = Speculation()
    timing: Timing = Timing()
    stop_reason: str | int | None = None
    seed: int = 0
    rule: Rule = Rule.REJECTION
    model: str = ""
    tokens: tuple[Token, ...] = ()
    num_resumes: int = 0
    reproducible: bool = False
    why_not_reproducible: str = ""
    hypotheses: tuple[Hypothesis, ...] = ()
    prompt: tuple[Token, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, as the command line prints it with `--json`."""
        has_logprobs = bool(self.tokens) and self.tokens[0].logprob is not None
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason.value,
            "stop_reason": self.stop_reason,
            "model": self.model,
            "seed": self.seed,
            "rule": self.rule.value,
            "reproducible": self.reproducible,
            "why_not_reproducible": self.why_not_reproducible,
            "usage": _fields(self.usage),
            "speculation": self.speculation.to_dict(),
            "timing": {name: round(value, 3) for name, value in _fields(self.timing).items()},
            "logprobs": _logprob_dicts(self.tokens) if has_logprobs else None,
            "prompt_logprobs": _logprob_dicts(self.prompt) if self.prompt else None,
            "num_resumes": self.num_resumes,
            "hypotheses": [_fields(each) for each in self.hypotheses],
        }


def _fields(record: Any) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(record).items()}


def _logprob_dicts(tokens: tuple[Token, ...]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token.token_id,
            "logprob": token.logprob,
            "top_logprobs": [{"token_id": t, "logprob": v} for t, v in token.top_logprobs],
        }
        for token in tokens
    ]
