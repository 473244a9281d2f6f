"""What proposes for a request: a method that needs no model, the draft model, both, or nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specwire.config.fields import check
from specwire.config.own_methods import DRAFT_MODEL, OWN
from specwire.config.services import CoordinatorConfig
from specwire.config.speculative import COUNTS, METHODS, MODEL, SUFFIX
from specwire.core import DRAFT_OFF, SamplingParams
from specwire.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What proposes; both empty for plain decoding.

    Attributes:
        method: one of METHODS, or empty.
        uses_model: whether the draft model does too, or alone.
        uses_own: whether the target does by itself.
        reads_earlier: whether the method drafts from outputs of earlier requests.
        follows_grammar: whether what the request's grammar leaves no choice about is proposed, too.
    """

    method: str = ""
    uses_model: bool = False
    uses_own: bool = False
    reads_earlier: bool = False
    follows_grammar: bool = False

    @property
    def uses_text(self) -> bool:
        """Whether something proposes for which no model is asked."""
        return self.method != "" or self.follows_grammar

    @property
    def is_on(self) -> bool:
        """Whether anything proposes."""
        return self.uses_model or self.uses_own or self.method != ""


class DraftChoices:
    """What a server offers: every method, and the draft model if it has one."""

    def __init__(
        self, config: CoordinatorConfig, model_name: Callable[[], str], *, own_source: str = ""
    ) -> None:
        """Args:
        model_name: of the draft model; empty while it is not known.
        own_source: what the target drafts with by itself; empty if it does not.

        Raises:
            ConfigError: that the target does is the default, and it does not; or there are two draft models.
        """
        default = config.own_draft.source if config.own_draft else ""
        problem = f"the verify service has no {default}: see its flag --{default}"
        check(default in ("", own_source), "speculative_config", config.speculative_config, problem)
        problem = "the verify service has a --draft-model in its own process; give one of both"
        has_both = own_source == DRAFT_MODEL and config.draft_address != ""
        check(not has_both, "draft_address", config.draft_address, problem)
        is_default = own_source == DRAFT_MODEL and config.text_draft is None
        self._own_source, self._uses_own = own_source, default != "" or is_default
        own = config.text_draft
        self._counts_corpus = own.method if own and own.corpus else ""
        self._has_model = bool(config.draft_address)
        self._is_off = config.fixed_draft_tokens == 0
        self._default_method = own.method if own else ""
        self._model_name = model_name

    def choose(self, given: str | None) -> DraftChoice:
        """The choice of a request: `METHOD`, `model` or the model's name, `METHOD,model`, `off`, or what the
        target drafts with by itself.

        It depends on the request alone, never on a token: under rejection sampling the output would not be
        exact otherwise.

        Raises:
            InvalidRequestError: not offered here.
        """
        if given == MODEL and self._own_source == DRAFT_MODEL:
            given = DRAFT_MODEL
        is_own = self._uses_own if given is None else OWN.get(given, given) == self._own_source != ""
        if is_own:
            return DraftChoice(uses_own=True)
        if given is None:
            method = self._default_method
            return self._choice(method, uses_model=self._has_model or not method)
        if given == DRAFT_OFF:
            return DraftChoice()
        first, comma, rest = given.partition(",")
        method, model = (first, rest) if first in METHODS else ("", given)
        models = [MODEL, *filter(None, [self._model_name()])] if self._has_model else []
        if (comma or not method) and model not in models:
            offered = ", ".join([*METHODS, *models, *filter(None, [self._own_source]), DRAFT_OFF])
            raise InvalidRequestError("draft", given, f"is not offered here: {offered}")
        return self._choice(method, uses_model=bool(model))

    def why_plain(self, params: SamplingParams, choice: DraftChoice) -> str:
        """Why no model drafts for a request of this choice; empty if request and flags allow it."""
        if params.draft == DRAFT_OFF:
            return f"the request asks for draft={DRAFT_OFF}"
        if params.num_draft_tokens == 0:
            return "the request asks for num_draft_tokens=0"
        if params.num_draft_tokens is None and self._is_off:
            return "the coordinator runs with --num-draft-tokens 0"
        return f"{choice.method} found nothing to propose" if choice.method and not choice.uses_model else ""

    def _choice(self, method: str, *, uses_model: bool) -> DraftChoice:
        reads_earlier = method == SUFFIX or (method in COUNTS and method != self._counts_corpus)
        return DraftChoice(method, uses_model=uses_model, reads_earlier=reads_earlier)
