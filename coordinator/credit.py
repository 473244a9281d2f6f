"""How far a generation may be ahead of its client, in tokens. Knows no grpc.

    acknowledged         sent                 emitted
    ├── consumed ──┤├── in flight ─────┤├── held back ──┤├── the next round ──┤
                   ╰───────────────── at most `window` ──────────────────────╯

Tokens are held back while they may be part of a stop string or of an incomplete character; no client can
acknowledge those. Nor does it have to acknowledge the last 15 that it received (see the proto). So with no
more than those in flight a round always starts: otherwise both sides would wait for each other.
"""

from __future__ import annotations

from specwire.core import MAX_CREDIT_TOKENS, MAX_UNACKNOWLEDGED_TOKENS
from specwire.errors import InvalidRequestError


class Credit:
    """The account of one generation, in tokens.

    Args:
        window: how far the generation may be ahead of acknowledgements; 0 is without limit.
        round_len: most tokens that a round emits.
    """

    def __init__(self, window: int, round_len: int) -> None:
        self._window = window
        self._round_len = round_len
        self._num_emitted = self._num_sent = self._num_acknowledged = 0

    @property
    def has_room(self) -> bool:
        """Whether a round may start."""
        if not self._window:
            return True
        num_ahead = self._num_emitted - self._num_acknowledged
        num_in_flight = self._num_sent - self._num_acknowledged
        return num_ahead + self._round_len <= self._window or num_in_flight <= MAX_UNACKNOWLEDGED_TOKENS

    def spend(self, *, num_emitted: int = 0, num_sent: int = 0) -> None:
        """Count tokens that a round emitted, and those that its message carries; call it before that is sent.

        As long as it is not known which can be sent, all count; `num_sent` is negative to correct that.
        """
        self._num_emitted += num_emitted
        self._num_sent += num_sent

    def acknowledge(self, num_tokens: int) -> None:
        """The client has consumed `num_tokens` more, at least 1.

        Raises:
            InvalidRequestError: the client did not ask for credit, or exceeds its limit.
        """
        if not self._window:
            raise InvalidRequestError("credit_tokens", num_tokens, "the first request asked for no credit")
        unused = self._window + self._num_acknowledged + num_tokens - self._num_sent
        if unused > MAX_CREDIT_TOKENS:
            raise InvalidRequestError(
                "credit_tokens", num_tokens, f"makes {unused} unused, over the limit of {MAX_CREDIT_TOKENS}"
            )
        self._num_acknowledged += num_tokens
