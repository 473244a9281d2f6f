"""What proposes for a request: a method that needs no model, the draft model, both, or nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specwire.config.fields import check
from specwire.config.services import CoordinatorConfig
from specwire.config.speculative import COUNTS, HEADS, MEDUSA, METHODS, OWN_DRAFTS, SUFFIX
from specwire.core import DRAFT_OFF
from specwire.errors import InvalidRequestError

MODEL = "model"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What proposes; both empty for plain decoding.

    Attributes:
        method: one of METHODS, or empty.
        uses_model: whether the draft model does too, or alone.
        uses_heads: whether the target does by itself.
        reads_earlier: whether the method drafts from outputs of earlier requests.
    """

    method: str = ""
    uses_model: bool = False
    uses_heads: bool = False
    reads_earlier: bool = False

    @property
    def is_on(self) -> bool:
        """Whether anything proposes."""
        return self.uses_model or self.uses_heads or self.method != ""


class DraftChoices:
    """What a server offers: every method, and the draft model if it has one."""

    def __init__(
        self, config: CoordinatorConfig, model_name: Callable[[], str], *, own_draft: str = ""
    ) -> None:
        """Args:
        model_name: of the draft model; empty while it is not known.
        own_draft: with what the target drafts by itself; empty for nothing.

        Raises:
            ConfigError: one of these is the default, and the target does not have it.
        """
        wanted = config.own_draft
        problem = f"the verify service has no {wanted}: see its flag --{wanted}"
        name = "speculative_config"
        check(wanted in ("", own_draft), name, config.speculative_config, problem)
        self._uses_heads = config.uses_heads
        names = (HEADS, MEDUSA) if own_draft == HEADS else (own_draft,)
        self._own_names = names if own_draft in OWN_DRAFTS else ()
        own = config.speculation
        self._counts_corpus = own.method if own and own.corpus else ""
        self._has_model = bool(config.draft_address)
        self._default_method = own.method if own else ""
        self._model_name = model_name

    def choose(self, given: str | None) -> DraftChoice:
        """The choice of a request: `METHOD`, `model` or the model's name, `METHOD,model`, `heads`,
        `mtp`, `dflash`, or `off`.

        It depends on the request alone, never on a token: under rejection sampling the output would not be
        exact otherwise.

        Raises:
            InvalidRequestError: not offered here.
        """
        if given in self._own_names or (given is None and self._uses_heads):
            return DraftChoice(uses_heads=True)
        if given is None:
            method = self._default_method
            return self._choice(method, uses_model=self._has_model or not method)
        if given == DRAFT_OFF:
            return DraftChoice()
        first, comma, rest = given.partition(",")
        method, model = (first, rest) if first in METHODS else ("", given)
        if comma or not method:
            self._check_model(given, model)
        return self._choice(method, uses_model=bool(model))

    def _choice(self, method: str, *, uses_model: bool) -> DraftChoice:
        reads_earlier = method == SUFFIX or (method in COUNTS and method != self._counts_corpus)
        return DraftChoice(method, uses_model=uses_model, reads_earlier=reads_earlier)

    def _check_model(self, given: str, model: str) -> None:
        models = [MODEL, *filter(None, [self._model_name()])] if self._has_model else []
        if model not in models:
            offered = ", ".join([*METHODS, *models, *self._own_names[:1], DRAFT_OFF])
            raise InvalidRequestError("draft", given, f"is not offered here: {offered}")
