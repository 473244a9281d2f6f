"""The nouns of specwire, shared by every process; `completion.py` has a client's. No torch, no grpc, no I/O.

The terms are those of the field (see docs/architecture.md): a *round* is one draft → verify → commit
cycle; `output = accepted + (recovered or bonus)`; `num_draft_tokens` is γ.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from specwire.errors import InvalidRequestError
from specwire.text.grammar import Grammar
from specwire.text.unicode import is_whole

if TYPE_CHECKING:
    from specwire.support import FloatArray, IntArray, Support

# Nouns are values: once made they do not change. Those that every round makes anew are not `frozen`: a field
# of a frozen one takes ten times as long to set.

PROTOCOL_VERSION = 13
MAX_NUM_DRAFT_TOKENS = 64
MAX_TREE_NODES = 64
"""A node's ancestors are the bits of one word."""
MAX_SUPPORT = 256
"""Most tokens in a draft distribution, if nothing else is asked for."""
SUPPORT_MASS = 0.99
"""Probability mass that it keeps, likewise."""
MAX_NUM_OUTCOMES = 64
MAX_PATH_LEN = MAX_NUM_OUTCOMES * (MAX_NUM_DRAFT_TOKENS + 1)
"""Most tokens that a prepared proposal depends on: those of as many rounds as outcomes are prepared for."""
MAX_AT_ONCE = 1 << 14
"""Generations of a coordinator, and so sequences to open, or requests, in a message to a model service. Each
that is wrong costs a service's event loop 50 us, for which all streams wait."""
MAX_LOGPROBS = 20
MAX_NUM_BEAMS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_CACHE_SALT_LEN = 256
MAX_ADAPTER_LEN = 256
MAX_DRAFT_LEN = 256
"""Longest name of a draft, in characters."""
DRAFT_OFF = "off"
"""The draft of a request that is decoded plainly."""
_MAX_INT = 2**31 - 1
"""Largest count and token id on the wire."""
# Flow control by credit, in tokens: the least and the most credit of a stream, and the most consumed tokens
# that a client may leave unacknowledged (see proto/specwire/v1/generation.proto).
MIN_CREDIT_TOKENS = 64
MAX_CREDIT_TOKENS = 1 << 20
MAX_UNACKNOWLEDGED_TOKENS = 15


class Rule(enum.StrEnum):
    """How draft tokens are verified. Every rule is exact."""

    REJECTION = "rejection"
    """Rejection sampling, token by token (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
    2302.01318)."""
    BLOCK = "block"
    """The same with the draft tokens of a round judged together (Sun et al. 2024, arXiv 2403.10444): it keeps
    more of them."""
    KSEQ = "kseq"
    """Rejection sampling of several chains of draft tokens, drawn independently (k-SEQ of SpecTr, Sun et al.
    2023, arXiv 2310.15141)."""
    GUMBEL = "gumbel"
    """Gumbel coupling (Daliri, Musco, Suresh 2024, arXiv 2408.07978): the seed fixes the text, with any
    draft; bitwise where the target is batch-invariant."""


class Fate(enum.StrEnum):
    """How a token was decided in its round."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    RECOVERED = "recovered"
    BONUS = "bonus"
    GIVEN = "given"
    """Part of the request: of its prompt, or of a resumed generation; clients report its previous fate."""
    PLAIN = "plain"
    """The target's own, in a round without draft tokens."""


def _check(ok: bool, name: str, value: object, problem: str) -> None:
    if not ok:
        raise InvalidRequestError(name, value, problem)


Check = Callable[[str, Any], None]
"""Raises InvalidRequestError unless a parameter, given by name and value, is valid."""


def _must(is_valid: Callable[[Any], bool], problem: str) -> Check:
    return lambda name, value: _check(is_valid(value), name, value, problem)


def _number(least: float, most: float, interval: str = "", kinds: Any = (int, float)) -> Check:
    """A finite number in `interval`, which is [least, most] if it is not given."""

    def is_valid(value: Any) -> bool:
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and least <= value <= most and abs(value) < math.inf

    return _must(is_valid, f"must lie in {interval or [least, most]}")


def _whole(least: int, most: int, interval: str = "") -> Check:
    """A whole number in `interval`, as `_number`."""
    return _number(least, most, interval, int)


def _text(least: int, most: int) -> Check:
    problem = f"must be a text of {least} to {most} characters"
    return _must(
        lambda value: isinstance(value, str) and least <= len(value) <= most and is_whole(value), problem
    )


def _each(check: Check, most: int) -> Check:
    """At most so many values, each of them valid."""

    def check_all(name: str, values: Sequence[Any]) -> None:
        _check(len(values) <= most, name, len(values), f"more than {most}")
        for value in values:
            check(name, value)

    return check_all


def _check_biases(name: str, biases: Mapping[int, float]) -> None:
    _check(len(biases) <= MAX_LOGIT_BIASES, name, len(biases), f"more than {MAX_LOGIT_BIASES} ids")
    for token_id, bias in biases.items():
        is_usual = type(token_id) is int and type(bias) is float and 0 <= token_id <= _MAX_INT
        if not (is_usual and -100 <= bias <= 100):  # a request may have thousands
            _COUNT(f"{name}[{token_id!r}]", token_id)
            _number(-100, 100)(f"{name}[{token_id!r}]", bias)


_COUNT, _SHARE, _PENALTY = _whole(0, _MAX_INT, "[0, 2**31)"), _number(0, 1), _number(-2, 2)
_DRAFT_TOKENS, _TOP = _whole(0, MAX_NUM_DRAFT_TOKENS), _whole(0, MAX_LOGPROBS)
_BEAMS = _whole(1, MAX_NUM_BEAMS)
_SWITCH = _must(lambda given: isinstance(given, bool), "must be True or False")


def _of(default: Any, check: Check | None, doc: str) -> Any:
    """A field of `SamplingParams`.

    Args:
        check: of values that are neither the default nor None.
        doc: sentences, of which the first is the help of its flag.
    """
    given: Any = {"default_factory": dict} if default == {} else {"default": default}
    return field(**given, metadata={"doc": doc, "check": check})


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Every parameter works with speculation.

    This is the table of parameters: flags of the command line, fields of HTTP bodies and of messages, and
    their descriptions follow from the fields here.

    The target's distribution at a position is made from its logits in this order (that of
    transformers' `generate`): `logit_bias`, `repetition_penalty`, `presence_penalty` and
    `frequency_penalty`, `grammar`, `min_tokens`, `temperature`, `top_k`, `top_p`, `min_p`.

    Raises:
        InvalidRequestError: on construction, naming the field and the value.
    """

    max_tokens: int | None = _of(
        256, _COUNT, "Most tokens to emit. None for as many as the context has room for."
    )
    temperature: float = _of(
        1.0, _number(0, math.inf, "[0, inf)"), "Divides the logits; 0 is greedy decoding."
    )
    top_k: int = _of(0, _COUNT, "Keep the k likeliest tokens; 0 keeps all.")
    top_p: float = _of(
        1.0,
        _number(math.ulp(0.0), 1, "(0, 1]"),
        "Keep the fewest likeliest tokens with this mass, in (0, 1].",
    )
    min_p: float = _of(0.0, _SHARE, "Drop tokens less likely than this times the likeliest, in [0, 1].")
    repetition_penalty: float = _of(
        1.0,
        _number(0.01, 100),
        "Divides positive, multiplies negative logits of earlier tokens. In [0.01, 100].",
    )
    presence_penalty: float = _of(
        0.0, _PENALTY, "Subtracted from the logit of every token in the output so far. In [-2, 2]."
    )
    frequency_penalty: float = _of(
        0.0, _PENALTY, "Subtracted from a token's logit for each time in the output. In [-2, 2]."
    )
    logit_bias: Mapping[int, float] = _of(
        {}, _check_biases, "Token id to what is added to its logit, in [-100, 100]."
    )
    grammar: Grammar | None = _of(  # noqa: RUF009
        None,
        _must(lambda given: isinstance(given, Grammar), "must be a Grammar"),
        "What the output must match; tokens that cannot lead there have probability 0.",
    )
    stop: tuple[str, ...] = _of(
        (),
        _each(_text(1, MAX_STOP_LEN), MAX_STOP_STRINGS),
        "String that ends the output, without being part of it.",
    )
    stop_token_ids: tuple[int, ...] = _of(
        (),
        _each(_COUNT, MAX_STOP_TOKEN_IDS),
        "Token ids that end the output; part of `token_ids`, not of the text.",
    )
    ignore_eos: bool = _of(False, _SWITCH, "Continue past the model's end-of-sequence token.")
    min_tokens: int = _of(
        0,
        _COUNT,
        "So many first tokens are neither the end-of-sequence token nor one of `stop_token_ids`. These have "
        "probability 0 there, and a stop string that they contain does not end the output.",
    )
    skip_special_tokens: bool = _of(
        True,
        _SWITCH,
        "Leave special tokens out of the text. False writes them by their names; one that ends the output is "
        "never part of the text.",
    )
    seed: int | None = _of(
        None,
        _whole(0, 2**63 - 1, "[0, 2**63)"),
        "Fixes all random choices. In [0, 2**63); None lets the server draw one, which the completion "
        "reports. Under `Rule.GUMBEL` it fixes the text (see `Completion.reproducible`); under other rules "
        "only together with `num_draft_tokens`, else each request may differ.",
    )
    rule: Rule | None = _of(  # noqa: RUF009
        None,
        None,
        "How draft and target are reconciled. None leaves it to the server, which the completion reports. By "
        "default it takes `GUMBEL` if a seed is given or the draft is far away, else `BLOCK`; one that "
        "selects by k-SEQ takes `KSEQ` where no seed is given.",
    )
    num_draft_tokens: int | None = _of(
        None,
        _DRAFT_TOKENS,
        "Draft tokens a round; 0 disables speculation. None leaves it to the server, round by round.",
    )
    max_depth: int | None = _of(
        None,
        _DRAFT_TOKENS,
        "Longest path of a token tree of `num_draft_tokens` nodes; 0 for chains. None leaves it to the "
        "server. Trees need temperature 0 or `Rule.GUMBEL`, and services that have them (`ModelInfo.trees`).",
    )
    draft: str | None = _of(
        None,
        _text(1, MAX_DRAFT_LEN),
        "What proposes: ngram, suffix, unigram, bigram, trigram; model, or its name; both as ngram,model; or "
        "off. None leaves it to the server. The completion counts tokens by what made them.",
    )
    logprobs: int | None = _of(
        None, _TOP, "Report log probabilities under the target, and those of the n likeliest."
    )
    prompt_logprobs: int | None = _of(
        None,
        _TOP,
        "Report log probabilities of the prompt's tokens, and those of the n likeliest. `max_tokens` may be "
        "0 then. The target runs the whole prompt for it, cached or not.",
    )
    num_beams: int = _of(
        1,
        _BEAMS,
        "Beam search with so many beams, as transformers' `generate` has it; 1 is without. It needs "
        "temperature 0, and neither seed, rule, penalties, stop strings nor log probabilities.",
    )
    length_penalty: float = _of(
        1.0,
        _number(-8, 8),
        "Of beam search: power of a length that divides a score; over 0 favours long texts. In [-8, 8].",
    )
    early_stopping: bool | str = _of(
        False,
        _must(lambda given: isinstance(given, bool) or given == "never", 'must be True, False or "never"'),
        "Of beam search: end it with `num_beams` finished texts. With never, once no better one is possible; "
        "False judges that by the present length.",
    )
    num_return_sequences: int = _of(
        1, _BEAMS, "Of beam search: texts in the completion, at most `num_beams`."
    )
    cache_salt: str = _of(
        "",
        _text(0, MAX_CACHE_SALT_LEN),
        "Share cached prompts with requests of the same salt only; the text does not depend on it. With "
        "bearer tokens, requests of different principals never share them.",
    )
    adapter: str = _of(
        "",
        _text(0, MAX_ADAPTER_LEN),
        "Name of the LoRA adapter that the target is run with, one of `ModelInfo.adapters`; empty for none. "
        "Drafts are made without it.",
    )

    def __post_init__(self) -> None:
        self._coerce()
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is not default and not (value is None and name in _OPTIONAL):
                check(name, value)
        most, depth = self.max_tokens, self.max_depth
        least = 1 if self.prompt_logprobs is None else 0
        _check(most is None or most >= least, "max_tokens", most, f"must lie in [{least}, 2**31)")
        fits = most is None or self.min_tokens <= most
        _check(fits, "min_tokens", self.min_tokens, f"is over max_tokens={most}")
        can_match = self.matches_tokens or self.rule is None
        _check(not depth or can_match, "max_depth", depth, f"trees need rule {Rule.GUMBEL} or temperature 0")
        agrees = self.draft != DRAFT_OFF or not self.num_draft_tokens
        _check(agrees, "draft", self.draft, f"contradicts num_draft_tokens={self.num_draft_tokens}")
        num, most_texts = self.num_beams, self.num_return_sequences
        _check(most_texts <= num, "num_return_sequences", most_texts, f"is over num_beams={num}")
        for name in ("length_penalty", "early_stopping"):
            value, default = getattr(self, name), PARAMETERS[name].default
            _check(num > 1 or value == default, name, value, "needs num_beams over 1")

    def _coerce(self) -> None:
        """Accept other types that callers use: a single stop string, lists, a rule by name."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        kinds: dict[str, type] = {"stop": tuple, "stop_token_ids": tuple, "logit_bias": dict}
        for name, kind in kinds.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except (TypeError, ValueError):
                raise InvalidRequestError(name, value, f"is no {kind.__name__}, and cannot be one") from None
        try:
            object.__setattr__(self, "rule", None if self.rule is None else Rule(self.rule))
        except ValueError:
            known = ", ".join(rule.value for rule in Rule)
            raise InvalidRequestError("rule", self.rule, f"is not one of {known}") from None

    @property
    def greedy(self) -> bool:
        """True at temperature 0, where the target's distribution is one-hot."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """True if penalties make the distribution at a position depend on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def matches_tokens(self) -> bool:
        """True if a draft token is accepted by equality with the target's own: no probabilities are sent."""
        return self.greedy or self.rule is Rule.GUMBEL


PARAMETERS = {each.name: each for each in fields(SamplingParams)}
"""The fields by name; `metadata["doc"]` describes one."""
WARPS = ("temperature", "top_k", "top_p", "min_p")
"""Those that change the distribution by itself, in their order."""
SAMPLING_DEFAULTS = {name: PARAMETERS[name].default for name in (*WARPS, "repetition_penalty")}
"""What a model's generation config may ask for, with the value that is without effect."""
_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
KINDS = {
    name: kind
    for name, each in PARAMETERS.items()
    if (kind := _TYPES.get(str(each.type).removesuffix(" | None")))
}
"""Of parameters that are one number, switch or text: which."""
_OPTIONAL = {name for name, each in PARAMETERS.items() if str(each.type).endswith("None")}
SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n    Attributes:\n" + "\n".join(
    f"        {name}: {each.metadata['doc']}" for name, each in PARAMETERS.items()
)
_CHECKS = [
    (name, each.default, check) for name, each in PARAMETERS.items() if (check := each.metadata["check"])
]


@dataclass(slots=True)
class Proposal:
    """Draft tokens for the positions from `base_len` on, as a chain or as a tree (`specwire.proposals.tree`).

    Attributes:
        base_len: the committed length that it extends, in tokens.
        token_ids: [num_draft_tokens].
        parents: [num_draft_tokens] index of each token's parent, -1 for the prefix; empty for a chain. Trees
            only where tokens are matched, and of several chains.
        supports: [num_draft_tokens] under rejection sampling; empty where tokens are matched. Entry 0 is
            what the tokens after the prefix were drawn from, entry i + 1 what those after token i were: in a
            chain, entry i is that of token i. Entries after the end of one of several chains are empty.
        source: what made it: a model's name, or a method of the coordinator's own.
        support_len: entries that each of its supports was padded to when it arrived: sent on, it must have a
            size that does not depend on its tokens either.
        leaves: of several chains that were drawn independently (`proposals.chains`), the last token of each,
            in the order of the draws; chains with the same tokens share them. Empty otherwise.
    """

    base_len: int
    token_ids: Sequence[int] = ()
    supports: Sequence[Support] = ()
    source: str = ""
    parents: Sequence[int] = ()
    support_len: int = 0
    leaves: Sequence[int] = ()

    def parent(self, node: int) -> int:
        """Index of a token's parent; -1 for the prefix."""
        return self.parents[node] if self.parents else node - 1

    def children(self, node: int) -> list[int]:
        """Indices of the tokens that follow a token, or the prefix (-1)."""
        if not self.parents:
            return [node + 1] if node + 1 < len(self.token_ids) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def first(self, num_tokens: int) -> Proposal:
        """The first tokens of a chain or a tree; their number must not depend on the tokens."""
        if num_tokens >= len(self.token_ids):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            supports=self.supports[:num_tokens],
            parents=self.parents[:num_tokens],
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a target is to do by itself after a verdict.

    Attributes:
        num_draft_tokens: to be proposed; none if 0.
        max_depth: longest path of a tree; 0 for a chain.
        num_plain: rounds without draft tokens that it may begin unasked, if it proposes nothing.
    """

    num_draft_tokens: int = 0
    max_depth: int = 0
    num_plain: int = 0


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a draft service is to prepare before the verdict on its proposal.

    Attributes:
        num_outcomes: most outcomes to work on at a time.
        num_draft_tokens: to draft for each.
        max_depth: longest path of a tree; 0 for chains.
    """

    num_outcomes: int
    num_draft_tokens: int
    max_depth: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities (nats) of one position under the target, before warps and penalties.

    Attributes:
        token_ids: int64 [n]: the tokens that may be emitted here, then the likeliest ones.
        values: float32 [n].
        num_top: how many of the last entries are the likeliest ones, best first.
    """

    token_ids: IntArray
    values: FloatArray
    num_top: int

    def of(self, token_id: int) -> float:
        """Log probability of a token that may be emitted here."""
        return float(self.values[self.token_ids.tolist().index(token_id)])

    def top(self) -> list[tuple[int, float]]:
        """The likeliest tokens with their log probabilities, best first."""
        start = len(self.token_ids) - self.num_top
        return [(int(t), float(v)) for t, v in zip(self.token_ids[start:], self.values[start:], strict=True)]


NO_TOKEN = -2
"""In a verdict: a grammar has no token of the vocabulary here, or the target's logits are not finite."""


@dataclass(slots=True)
class Verdict:
    """The target's verdict on a proposal of γ tokens: one row for the prefix, and one for each token.

    In a chain, row i is the target's distribution at draft position i, and the last row that of the bonus
    token. In a tree, row i + 1 is the distribution after node i and its ancestors.

    Attributes:
        base_len: committed length of the proposal, in tokens.
        target_token_ids: [γ + 1]. Where tokens are matched: the target's own choice at each position.
            Under rejection sampling: at draft positions the tail token, drawn from the target outside
            the support (-1 where no mass is left there); at the last position the bonus token. `NO_TOKEN`
            where none can follow, never in the first row: a request whose first row is like that has failed.
        target_probs: [γ] arrays, float32 [support_size]: the target's probabilities there (rejection only).
        tail_mass: float64 [γ]: the target's mass outside each support (rejection only).
        logprobs: [γ + 1] if requested, else empty.
    """

    base_len: int
    target_token_ids: Sequence[int]
    target_probs: Sequence[FloatArray] = ()
    tail_mass: Sequence[float] = ()
    logprobs: Sequence[Logprobs] = ()


class Timings(NamedTuple):
    """Where the time of a request went while it was at the service that answered it, in nanoseconds.

    Attributes:
        queue_ns: from its arrival to its first forward pass.
        forward_ns: its passes since its arrival.
        residence_ns: from its arrival until its answer was sent.
        stall_ns: between its passes.
        ahead_ns: passes for it, and for what follows it, before it arrived; not part of the residence.
    """

    queue_ns: int = 0
    forward_ns: int = 0
    residence_ns: int = 0
    stall_ns: int = 0
    ahead_ns: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a model service, and the cost of its forward passes.

    Attributes:
        num_waiting: requests in its queue when it responded.
        num_sequences: sequences in the pass of the response.
        base_ns, sequence_ns, token_ns: cost of a pass: base plus a rate for each sequence and each token; all
            0 before it is measured.
        draft_pass_ns, draft_node_ns: of what the target drafts by itself after a pass: a rate for each pass
            of its draft, one after another, and each node that these run, of any sequence; both 0 while it
            drafts nothing. Of a draft service, the same of the passes that its device decodes chains with.
        draft_hosted_ns: what such a pass takes besides where the host chooses its tokens, as it does those of
            trees, and the device chooses those of chains; 0 where the host chooses all.
        prefill_ns: what prompts took of the pass of the response, and of the drafts after it.
        draft_prefill_ns: of this, what they took of the drafts.
    """

    num_waiting: int = 0
    num_sequences: int = 1
    base_ns: int = 0
    sequence_ns: int = 0
    token_ns: int = 0
    draft_pass_ns: int = 0
    draft_node_ns: int = 0
    draft_hosted_ns: int = 0
    prefill_ns: int = 0
    draft_prefill_ns: int = 0

    def pass_ns(self, num_sequences: float, num_tokens: float) -> float:
        """A pass of so many tokens, of all its sequences; 0 before it is measured."""
        return self.base_ns + num_sequences * self.sequence_ns + num_tokens * self.token_ns

    def own_draft_ns(self, num_passes: float, num_nodes: float, *, is_hosted: bool = False) -> float:
        """What the target drafts by itself in so many passes; 0 before it is measured."""
        pass_ns = self.draft_pass_ns + is_hosted * self.draft_hosted_ns
        return num_passes * pass_ns + num_nodes * self.draft_node_ns


@dataclass(slots=True)
class Outcome:
    """How a round ended.

    Attributes:
        path: indices of the accepted draft tokens, in order; in a chain the first ones.
        next_token: the token after them, recovered or bonus.
    """

    path: Sequence[int]
    next_token: int

    @property
    def num_accepted(self) -> int:
        return len(self.path)


class Continuation(NamedTuple):
    """How the verify service goes on by itself after a verdict.

    Attributes:
        ahead_id: of the proposal that it judges next, under 0 for one of its own; 0 if it waits.
        outcome: of the round, by the same rule.
    """

    ahead_id: int
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """What a draft that learns while it serves has come to.

    Agreement is the probability that the draft's own token is the target's, at the temperature of the
    request; under greedy decoding the share of tokens that are.

    Attributes:
        num_steps: of its optimiser.
        num_judged_tokens: of the target, which the draft was tested on before it learnt from them.
        first_agreement: of the weights that it began with, until they were replaced.
        agreement: of the weights that served, over the latest of these tokens.
        num_versions: how often the weights that it serves with were replaced.
        num_rollbacks: how often it went back to them, since what it had learnt was no better.
    """

    num_steps: int = 0
    num_judged_tokens: int = 0
    first_agreement: float = 0.0
    agreement: float = 0.0
    num_versions: int = 0
    num_rollbacks: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """A model service's description of itself in the handshake.

    Attributes:
        name: directory or hub id it was loaded from, without the path above it.
        vocab_size: rows of the output embedding, padding included.
        context_len: most tokens of one sequence, prompt and output together; of an encoder-decoder, of what
            its decoder has.
        tokenizer_fingerprint: hash of the token → id table; empty without a tokenizer.
        eos_token_ids: the model's own end-of-sequence tokens.
        incarnation: differs after every restart of the service.
        tokenizer_source: where the service has loaded the tokenizer from; empty without a tokenizer.
        tokenizer_hash, tokenizer_bytes: of a target, SHA-256 and size of its `TokenizerFiles`.
        prepares_outcomes: whether it can prepare proposals before the verdict on the last.
        batch_invariant: whether a token is computed bitwise the same in any batch.
        weights_fingerprint: of config and weights; empty without weights.
        trees: whether proposals may be trees.
        drafts: whether a target proposes by itself.
        grammars: whether it constrains outputs by a grammar.
        own_source: of such a target, the source of its proposals: `heads`, `layers`, `mtp`, `dflash`,
            `eagle3` or `draft_model`.
        target_tokenizer_fingerprint: of a draft with another vocabulary, that of the target whose tokens it
            proposes; empty for one that proposes its own tokens.
        shared_vocab, shared_text: of such a draft, the share of the target's tokens that it has too: of all,
            and of those of a sample text.
        inner: of a draft with a drafter of its own, what that is: a method or a model's name; empty without.
        encoder_len: of an encoder-decoder, most tokens of its encoder's input; 0 for other models.
        decoder_token_ids: of an encoder-decoder, what its decoder begins with, after the input and before the
            output.
        learning: of a draft that learns while it serves; None for one that does not.
        chat_template: of a coordinator's target, what conversations with tools are rendered with (Jinja);
            empty without one.
        least_pass_ms: least time of a pass, in milliseconds, where passes are paced; 0 for others.
        host: names the machine that runs it, until that starts again; empty where that is not known.
        devices: names of the accelerators that run it; empty on a CPU.
        num_cores, num_threads: cores that the service may use, and most that a pass on a CPU uses.
        num_ranks: that the model is spread over; 0 where it is on one device.
        costs: what its passes cost, as measured when it was loaded; None if they were not.
        adapters: of a target, hashes of the config and the weights of its LoRA adapters, by their names.
        sampling: of a target, the parameters that its generation config asks for where a request over HTTP
            does not say them.
    """

    name: str
    vocab_size: int
    context_len: int
    tokenizer_fingerprint: str = ""
    dtype: str = ""
    num_parameters: int = 0
    eos_token_ids: tuple[int, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    incarnation: str = ""
    tokenizer_source: str = ""
    prepares_outcomes: bool = False
    batch_invariant: bool = False
    weights_fingerprint: str = ""
    trees: bool = False
    drafts: bool = False
    grammars: bool = False
    own_source: str = ""
    target_tokenizer_fingerprint: str = ""
    shared_vocab: float = 0.0
    shared_text: float = 0.0
    inner: str = ""
    encoder_len: int = 0
    decoder_token_ids: tuple[int, ...] = ()
    learning: Learning | None = None
    chat_template: str = ""
    least_pass_ms: float = 0.0
    tokenizer_hash: str = ""
    tokenizer_bytes: int = 0
    host: str = ""
    devices: tuple[str, ...] = ()
    num_cores: int = 0
    num_threads: int = 0
    num_ranks: int = 0
    costs: Load | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why_not_reproducible(self) -> str:
        """What lets a target's text differ from one request to the next where tokens are matched, and what
        does not; empty for nothing."""
        if self.batch_invariant:
            return ""
        return (
            "where tokens are nearly equal, rounding decides by the batch: a target with verify "
            "--batch-invariant does not (as many ranks; between machines of one kind; not for every model)"
        )

    def is_beside(self, other: ModelInfo) -> bool:
        """Whether both run on one machine, as far as that is known."""
        return bool(self.host) and self.host == other.host

    def takes_turns_with(self, other: ModelInfo) -> bool:
        """Whether passes of both at a time take longer: on one accelerator, or on too few cores for the
        threads of both and for the process that asks for them."""
        if self.devices or other.devices:
            return not set(self.devices).isdisjoint(other.devices)
        most = min(self.num_cores, other.num_cores)
        return self.is_beside(other) and self.num_threads + other.num_threads + 1 > most

    @property
    def summary(self) -> str:
        """Name, size, dtype and context, for a log."""
        millions = f"{self.num_parameters / 1e6:.1f} M parameters in " if self.num_parameters else ""
        dtype = f"{self.dtype}, " if self.dtype else ""
        return f"{self.name} ({millions}{dtype}{self.context_len} tokens of context)"

    @property
    def has_encoder(self) -> bool:
        return self.encoder_len > 0

    @property
    def longest_len(self) -> int:
        """Most tokens of one sequence, an encoder's input included."""
        return self.encoder_len + self.context_len

    def decoded(self, prompt: Sequence[int]) -> Sequence[int]:
        """What the output continues as one text: the prompt, or what the decoder begins with."""
        return self.decoder_token_ids if self.has_encoder else prompt


def num_in_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    num_equal = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        num_equal += 1
    return num_equal


def check_token_ids(name: str, token_ids: Sequence[int] | IntArray, vocab_size: int) -> None:
    """Refuse ids that a vocabulary does not have.

    Raises:
        InvalidRequestError: naming the first of them, by its place unless it is in an array: these are
            columns of a message, or what is left of one.
    """
    if not isinstance(token_ids, Sequence):
        for token_id in token_ids[(token_ids < 0) | (token_ids >= vocab_size)][:1]:
            check_token_id(name, int(token_id), vocab_size)
    elif token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        for i, token_id in enumerate(token_ids):
            check_token_id(f"{name}[{i}]", token_id, vocab_size)


def check_adapter(name: str, adapters: Collection[str]) -> None:
    """Refuse an adapter, empty for none, that a model does not have.

    Raises:
        InvalidRequestError: naming it.
    """
    known = ", ".join(map(repr, adapters)) or "none"
    _check(name in ("", *adapters), "adapter", name, f"is not an adapter of the target, which has {known}")


def check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    """Raises:
    InvalidRequestError: the vocabulary does not have the id.
    """
    _check(0 <= token_id < vocab_size, name, token_id, f"is outside the vocabulary of {vocab_size}")
