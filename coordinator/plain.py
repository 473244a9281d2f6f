"""Why requests that leave the draft open are decoded plainly, for the coordinator's status and its log."""

from __future__ import annotations

import logging

from coordinator.drafts.choice import DraftChoices
from coordinator.length.choice import SharedChoice
from specwire.config.services import CoordinatorConfig
from specwire.core import SamplingParams

log = logging.getLogger(__name__)


class DefaultRequests:
    """Requests that leave the draft open."""

    def __init__(self, config: CoordinatorConfig, drafts: DraftChoices, choice: SharedChoice) -> None:
        self._choice = choice
        self._is_chosen = config.fixed_draft_tokens is None
        draft = drafts.choose(None)
        self._ruled_out = drafts.why_plain(SamplingParams(), draft)
        self._has_text, self._needs_service = bool(draft.method), draft.uses_model
        self._is_logged = False

    def why_plain(self, draft_unavailable: str) -> str:
        """Why they are decoded plainly at present; empty if they are not, or if their texts decide.

        `draft_unavailable` says why the draft service is not used now; empty if it is.
        """
        if self._has_text:
            return ""
        if self._needs_service and draft_unavailable:
            return self._ruled_out or f"the draft is unavailable: {draft_unavailable}"
        return self._ruled_out or self._does_not_pay

    def log_once(self) -> None:
        """Log that drafting does not pay, once that is known; `why_plain` follows what changes later."""
        if self._is_logged or not self._does_not_pay:
            return
        self._is_logged = True
        log.info("drafting %s; requests that leave the draft open are decoded plainly", self._does_not_pay)

    @property
    def _does_not_pay(self) -> str:
        return self._choice.why_plain if self._is_chosen else ""
