"""What a generation is made of: who plans its rounds, who drafts, who judges.

By what its request asks for, and what the coordinator was started with. Nothing is opened here: the parts
open their sequences at the model services when they need them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator.beams.followers import BeamDrafts, Followers
from coordinator.beams.planning import BeamPlanner, SharedBeamCosts
from coordinator.drafts.choice import DraftChoices
from coordinator.drafts.methods import TextDrafts
from coordinator.drafts.own import OwnDrafter
from coordinator.generation import Drafter, Planner
from coordinator.length.choice import SharedChoice
from coordinator.length.planners import (
    DEFAULT_TREE_NODES,
    AdaptiveLength,
    FixedLength,
    SeveralChains,
    WithText,
)
from coordinator.peers.drafter import RemoteDrafter
from coordinator.peers.handshake import DraftPool, VerifyPool
from coordinator.peers.verifier import RemoteVerifier
from coordinator.requests import CheckedRequest, GenerationRequest
from coordinator.scoring import scoring
from coordinator.totals import CallRecord
from specwire.config.services import CoordinatorConfig
from specwire.core import SamplingParams
from specwire.telemetry.tracing import Tracing
from specwire.text.tokenizer import Tokenizer


class Assembly:
    """Makes the parts of generations, and keeps what they learn together.

    Attributes:
        texts: of outputs and prompts that are drafted from.
        drafts: what may propose.
        choice: what the streams that draft by default learn together, or follow.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        verify: VerifyPool,
        draft: DraftPool,
        tokenizer: Tokenizer | None,
        tracer: Tracing,
        num_running: Callable[[], int],
    ) -> None:
        self._config, self._verify, self._draft, self._tracer = config, verify, draft, tracer
        self.texts = TextDrafts(config.text_draft, tokenizer)
        self.drafts = DraftChoices(
            config, lambda: draft.info.name if draft.info else "", own_source=verify.info.own_source
        )
        self._choice = SharedChoice(
            num_running,
            told=lambda: (verify.info.costs, draft.info.costs if draft.info else None),
            num_outcomes=config.fixed_outcomes,
            may_prepare=self._may_prepare,
        )
        self._own_choice = SharedChoice(num_running, told=lambda: (verify.info.costs, None))
        self._kseq_choice = SharedChoice(num_running, num_chains=config.model_draft.num_chains)
        self._beam_costs = SharedBeamCosts()
        self.choice = self._own_choice if self.drafts.choose(None).uses_own else self._choice
        if config.model_draft.selection:
            self.choice = self._kseq_choice

    @property
    def is_draft_far(self) -> bool:
        """Whether proposals of the draft service take long to arrive."""
        return self._choice.is_draft_far

    def _may_prepare(self) -> bool:
        """Whether the draft works during the target's passes: not where both would then be slower."""
        draft, target = self._draft.info, self._verify.info
        is_fixed = self._config.fixed_outcomes is not None
        return is_fixed or draft is None or not draft.takes_turns_with(target)

    def planner(self, checked: CheckedRequest) -> Planner:
        """How much to draft."""
        draft, num_draft_tokens = checked.draft, checked.num_draft_tokens
        choice, drafting = self._choice, self._draft.info
        if draft.uses_own:
            choice, drafting = self._own_choice, self._verify.info
        elif checked.num_chains > 1:
            choice, drafting = self._kseq_choice, None
        planner = planner_of(
            choice,
            num_draft_tokens if draft.uses_own or draft.uses_model else 0,
            checked.max_depth,
            has_trees=drafting is not None and drafting.trees,
            why_plain=checked.why_plain,
        )
        if checked.num_chains > 1:
            planner = SeveralChains(planner, checked.num_chains)
        if not draft.uses_text:
            return planner
        most = self.texts.config(draft.method).num_speculative_tokens
        return WithText(planner, most if num_draft_tokens is None else num_draft_tokens)

    def verifier(self, request: GenerationRequest, call: CallRecord, max_depth: int) -> RemoteVerifier:
        """Who judges; rounds have no path of draft tokens over `max_depth`."""
        is_alone = request.num_chains == 1 and request.beam_rules is None
        return self._remote_verifier(
            request,
            call,
            goes_on=self._config.verify_ahead and not request.draft.uses_text and is_alone,
            max_depth=max_depth,
            drafts=request.draft.uses_own or request.draft.follows_grammar,
        )

    def scorer(self, request: GenerationRequest, call: CallRecord) -> RemoteVerifier:
        """Who scores its prompt."""
        return self._remote_verifier(scoring(request), call)

    def _remote_verifier(
        self, request: GenerationRequest, call: CallRecord, **options: Any
    ) -> RemoteVerifier:
        return RemoteVerifier(
            self._verify,
            request,
            remaining_s=call.remaining_s,
            timeout_s=self._config.failover_timeout_s,
            tracer=self._tracer,
            parent=call.span,
            **options,
        )

    def drafter(self, request: GenerationRequest, call: CallRecord, verifier: RemoteVerifier) -> Drafter:
        """Who drafts: the target itself, the draft service, a text, or both of these."""
        if request.draft.uses_own:
            return OwnDrafter(verifier)
        params = request.keyed_params
        drafter: Drafter = self._remote_drafter(request, call, params, on_prepared=verifier.prepare)
        if request.draft.method:
            drafter = self.texts.drafter(request, drafter)
        return self.texts.forced(request, drafter, verifier) if request.draft.follows_grammar else drafter

    def _remote_drafter(
        self, request: GenerationRequest, call: CallRecord, params: SamplingParams, **options: Any
    ) -> RemoteDrafter:
        return RemoteDrafter(
            self._draft,
            params,
            request.prompt_len,
            request.target.vocab_size,
            may_teach=request.may_teach,
            may_be_tree=request.max_depth != 0 or request.num_chains > 1,
            num_chains=request.num_chains,
            timeout_s=self._config.draft_timeout_ms / 1e3,
            deadline_s=call.remaining_s(),
            tracer=self._tracer,
            parent=call.span,
            **options,
        )

    def beams(
        self, request: GenerationRequest, call: CallRecord, num_beams: int, max_depth: int
    ) -> tuple[BeamPlanner, BeamDrafts, Followers[RemoteVerifier]]:
        """Those of a beam search: who plans, and a sequence for each beam; none of the draft without one."""
        num_drafted = num_beams if request.draft.uses_model and self._config.draft_address else 0
        params = replace(request.keyed_params, logprobs=None)
        drafters = [self._remote_drafter(request, call, params) for _ in range(num_drafted)]
        verifiers = [self.verifier(request, call, max_depth) for _ in range(num_beams)]
        planner = BeamPlanner(
            request.num_draft_tokens if drafters else 0,
            request.max_depth,
            self._beam_costs,
            why_plain=request.why_plain or self._draft.unavailable,
        )
        prompt = request.prompt_token_ids
        return planner, BeamDrafts(drafters, prompt), Followers(verifiers, prompt)


def planner_of(
    choice: SharedChoice,
    num_draft_tokens: int | None,
    max_depth: int | None,
    *,
    has_trees: bool,
    why_plain: str = "",
) -> Planner:
    """Of a draft model, or of a target that drafts for itself."""
    if num_draft_tokens == 0:
        return FixedLength(0, choice, why_plain=why_plain)
    if num_draft_tokens is None and not max_depth:
        return AdaptiveLength(choice, has_trees=has_trees and max_depth is None)
    return FixedLength(num_draft_tokens or DEFAULT_TREE_NODES, choice, max_depth or 0)
