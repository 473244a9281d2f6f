"""Configuration of an emulated network link."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specwire.config.fields import check_amount, split_address
from specwire.config.flags import CheckedConfig, option


@dataclass(frozen=True, kw_only=True)
class Link(CheckedConfig):
    """Latency, jitter and bandwidth of a `delay_proxy.DelayProxy`."""

    rtt_ms: float = option(
        0.0, "round trip in milliseconds; half of it is added each way", check=check_amount
    )
    jitter_ms: float = option(
        0.0, "largest deviation of the delay of one way, in ms; at most rtt / 2", check=check_amount
    )
    bandwidth_mbps: float = option(
        0.0, "megabits a second each way, all connections together; 0 for no limit", check=check_amount
    )
    seed: int = option(0, "seed of the jitter")

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.rtt_ms / 2
        self._check(self.jitter_ms <= most, "jitter_ms", f"is more than half the round trip, {most}")

    @property
    def bytes_per_s(self) -> float:
        """Bytes that leave in a second, each way; infinite without a limit."""
        return self.bandwidth_mbps * 1e6 / 8 or math.inf


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(Link):
    """`specwire proxy`: a link with two ends."""

    listen: str = option(
        "127.0.0.1:0",
        "HOST:PORT to listen on; port 0 picks a free one",
        check=split_address,
        alias="address",
    )
    to: str = option("127.0.0.1:7071", "HOST:PORT of the service behind the proxy", check=split_address)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(self.to != self.listen, "to", "is --address itself")
