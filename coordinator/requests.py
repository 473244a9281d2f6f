"""A client's request, parsed once into one immutable object. Knows no grpc.

    first message ── check ──▶ CheckedRequest ── waits for its slot ── encode ──▶ GenerationRequest

Whatever can be refused without encoding the prompt is refused before the request waits; the tokenizer only
works for admitted requests.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from coordinator.beams.checks import check_beams, end_ids, rules_of
from coordinator.drafts.choice import DraftChoice, DraftChoices
from coordinator.prompts import Encoder, check_params, check_prompt, fitted, with_early_ends
from coordinator.resuming import checked_resume_info
from specwire.completion import ResumeInfo
from specwire.config.own_methods import OWN_METHODS
from specwire.config.security.bearer import Principal
from specwire.config.services import NO_SEED, CoordinatorConfig
from specwire.core import ModelInfo, Rule, SamplingParams
from specwire.errors import UnsupportedError
from specwire.rpc.wire import client as client_wire
from specwire.rule.beam_search import BeamRules
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRequest:
    """A request that may wait for a slot: all of it is known but the tokens of its prompt.

    Attributes:
        message: as the client sent it.
        caller: who sent it.
        params: with a seed and a rule; `max_tokens` may still be None.
        credit_window: how far the generation may be ahead of its client, in tokens; 0 without limit.
        num_draft_tokens: in each round; None where the coordinator chooses them round by round.
        max_depth: longest path of a tree; 0 for chains, None where the coordinator chooses.
        draft: what proposes.
        num_chains: most that a round has, drawn independently of each other.
        why_plain: as `DraftChoices.why_plain`.
    """

    message: generation_pb2.GenerateRequest
    caller: Principal
    params: SamplingParams
    credit_window: int
    num_draft_tokens: int | None
    max_depth: int | None
    draft: DraftChoice
    num_chains: int
    why_plain: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest(CheckedRequest):
    """One sequence to generate: a request with the tokens of its prompt.

    Attributes:
        prompt_token_ids: [prompt_len], at least one; of an encoder-decoder, its input and what its decoder
            begins with.
        params: with a seed, a rule and `max_tokens`; the completion names them.
        keyed_params: of the model services: the same with the seed that random numbers are keyed by, and with
            `min_tokens` all tokens that end the output in `stop_token_ids`.
        target: the model that generates.
        generated_token_ids: emitted before, by another coordinator; they count towards `max_tokens`.
        resume_info: what the client must send to resume the generation.
        output_scope: of `EarlierOutputs`; None where the draft uses none.
        beam_rules: of a beam search; None for any other request.
    """

    prompt_token_ids: Sequence[int]
    keyed_params: SamplingParams
    target: ModelInfo
    generated_token_ids: Sequence[int]
    resume_info: ResumeInfo
    output_scope: str | None
    beam_rules: BeamRules | None = None

    @property
    def report_progress(self) -> bool:
        """Whether chunks carry the round's draft tokens, counts and times."""
        return self.message.report_progress

    @property
    def prompt_len(self) -> int:
        """In tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """As its client counts them."""
        return self.prompt_len - len(self.target.decoder_token_ids)

    @property
    def why_not_reproducible(self) -> str:
        """What lets the text differ from one request to the next, and what does not; empty for nothing."""
        sampled = (
            f"draft tokens are sampled under rule {self.params.rule}, so the text depends on the draft: "
            "rule gumbel with a seed, or temperature 0, does not"
        )
        reasons = ("" if self.params.matches_tokens else sampled, self.target.why_not_reproducible)
        return "; ".join(filter(None, reasons))

    @property
    def may_teach(self) -> bool:
        """Whether a draft may change its weights by the output: no other request uses the random numbers that
        decided about it, or tokens are matched, where any draft is exact. Not by live beams, and not by what
        an adapter writes: the draft is that of the target without one."""
        if self.beam_rules is not None or self.params.adapter:
            return False
        return self.params.matches_tokens or self.keyed_params.seed != self.params.seed

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the output."""
        return end_ids(self.params, self.target)


@dataclass
class RequestParser:
    """Parses requests for one target.

    Attributes:
        drafts: what may propose.
        draft_is_far: whether proposals take long to arrive; asked where a request leaves the rule open.
        draft_learns: whether the draft model changes its weights by outputs.
    """

    config: CoordinatorConfig
    target: ModelInfo
    tokenizer: Tokenizer | None
    drafts: DraftChoices
    draft_is_far: Callable[[], bool]
    draft_learns: Callable[[], bool]

    def __post_init__(self) -> None:
        self._encoder = Encoder(self.tokenizer)
        self._has_seed = self.config.seed != NO_SEED
        self._seeds = random.Random(self.config.seed) if self._has_seed else secrets.SystemRandom()

    def check(self, message: generation_pb2.GenerateRequest, caller: Principal) -> CheckedRequest:
        """Parse a first message, and choose what it leaves open.

        Raises:
            InvalidRequestError: a field is out of range, or names a draft that is not offered.
            ContextLengthError: prompt and `max_tokens` do not fit into the context.
            UnsupportedError: the target cannot do what is asked for.
        """
        given_params = client_wire.generate_params(message)
        draft = self.drafts.choose(given_params.draft)
        if given_params.num_beams > 1:
            draft = check_beams(message, given_params, self.target, draft)
        params = self._with_seed_and_rule(given_params, draft)
        credit_window = client_wire.opening_credit(message)
        client_wire.check_prompt_size(message, self.config.max_prompt_bytes)
        client_wire.check_known(message)
        check_params(params, self.target, self.tokenizer)
        check_prompt(message, params, self.target, self.tokenizer)
        caller.check(params)
        tenant = caller.name if self.config.tokens else ""
        given = params.num_draft_tokens if draft.is_on else 0
        num_draft_tokens = self.config.fixed_draft_tokens if given is None else given
        may_be_several = draft.uses_model and self.target.trees and not params.greedy
        num_chains = self.config.model_draft.num_chains if may_be_several and params.rule is Rule.KSEQ else 1
        can_follow = num_chains == 1 and num_draft_tokens != 0 and params.num_beams == 1
        if can_follow and params.grammar is not None and not self.target.own_source:
            draft = replace(draft, follows_grammar=True)  # what the grammar prescribes is proposed, too
        return CheckedRequest(
            message=message,
            caller=caller,
            params=replace(params, cache_salt=cache_salt(tenant, params.cache_salt)),
            credit_window=credit_window,
            num_draft_tokens=num_draft_tokens,
            max_depth=self._max_depth(params, draft) if num_chains == 1 else 0,
            draft=draft,
            num_chains=num_chains,
            why_plain=self.drafts.why_plain(params, draft),
        )

    async def encode(self, checked: CheckedRequest) -> GenerationRequest:
        """Encode the prompt, and check what depends on its tokens.

        Errors as for `Encoder.token_ids`, `fitted` and `checked_resume_info`.
        """
        message = checked.message
        target = self.target
        prompt = await self._encoder.token_ids(message, target.encoder_len or target.context_len)
        params = fitted(checked.params, len(prompt), target, checked.caller.max_tokens)
        prompt += target.decoder_token_ids
        generated_token_ids = list(message.generated_token_ids)
        scope = self._output_scope(checked)
        learns = checked.draft.uses_model and self.draft_learns()
        is_adaptive = checked.num_draft_tokens is None or scope is not None or learns
        rules = rules_of(params, target)
        keyed = with_early_ends(_keyed(params, is_adaptive=is_adaptive), target)
        known = {each.name: getattr(checked, each.name) for each in fields(checked)} | {"params": params}
        return GenerationRequest(
            **known,
            prompt_token_ids=prompt,
            keyed_params=replace(keyed, logprobs=rules.num_top) if rules else keyed,
            target=target,
            generated_token_ids=generated_token_ids,
            resume_info=checked_resume_info(
                generated_token_ids,
                message.context_digest,
                prompt=prompt,
                params=params,
                target=target,
            ),
            output_scope=scope,
            beam_rules=rules,
        )

    def _max_depth(self, params: SamplingParams, draft: DraftChoice) -> int | None:
        """A number of draft tokens that the request fixes alone is that of a chain."""
        own = OWN_METHODS.get(self.target.own_source) if draft.uses_own else None
        is_chain = own is not None and not own.has_trees
        if params.max_depth and (is_chain or not self.target.trees):
            by = f"draft={self.target.own_source} makes" if is_chain else f"{self.target.name} verifies"
            raise UnsupportedError("max_depth", params.max_depth, f"{by} chains only")
        if is_chain:
            return 0
        if params.max_depth is not None:
            return params.max_depth
        if not (params.matches_tokens and self.target.trees):
            return 0
        fixed = self.config.fixed_max_depth
        return 0 if fixed is None and params.num_draft_tokens is not None else fixed

    def _output_scope(self, checked: CheckedRequest) -> str | None:
        """That of all requests with `--suffix-shared`, else of one principal and salt. A request without
        either may be of any client, and rejected draft tokens are shown: it drafts from its own text alone.
        """
        if not checked.draft.reads_earlier:
            return None
        return "" if self.config.suffix_shared else checked.params.cache_salt or None

    def _with_seed_and_rule(self, params: SamplingParams, draft: DraftChoice) -> SamplingParams:
        """Where a client or the server gives a seed, the same text is expected again, whatever the load.

        A target that drafts for itself is coupled: without noise that is shared, only the likeliest tokens
        could be proposed, and no trees.
        """
        rule = params.rule or self.config.fixed_rule
        if rule is None:
            asks = params.seed is not None or self._has_seed or bool(params.max_depth) or draft.uses_own
            if self.config.model_draft.selection and draft.uses_model:
                rule = Rule.GUMBEL if asks else Rule.KSEQ
            else:
                rule = Rule.GUMBEL if asks or self.draft_is_far() else Rule.BLOCK
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return replace(params, seed=seed, rule=rule)


def _keyed(params: SamplingParams, *, is_adaptive: bool) -> SamplingParams:
    """Draw a fresh seed where the draft could otherwise know how rounds will end.

    Under rejection sampling an adaptive length depends on what other requests have taught, and so do drafts
    from earlier outputs, and those of a model that learns from them. If one of these requests used the same
    random numbers (a seed given twice, a resumed request), a length or a draft token would depend on the
    outcome of this request's rounds. So no number is used twice; the text does not repeat in any case.
    """
    if params.matches_tokens or not is_adaptive:
        return params
    return replace(params, seed=secrets.randbits(63))


def cache_salt(tenant: str, given: str) -> str:
    """The salt that separates the cached prefixes of a request from others; empty to share them with all.

    A function of its arguments alone: the requests of a tenant share prefixes through all coordinators.

    Args:
        tenant: name of the bearer token; empty where tokens are not required.
        given: by the client, to separate requests of its own.
    """
    if not tenant and not given:
        return ""
    return hashlib.blake2b(f"{tenant}\0{given}".encode(), digest_size=16).hexdigest()
