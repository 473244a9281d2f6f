"""Configuration of the services; that of their clients is in `client.py`, that of stacks in `stack.py`.

Flags and `SPECWIRE_*` variables are derived from these fields (`flags.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from specwire.config.client import HttpConfig
from specwire.config.fields import (
    AUTO,
    at_least,
    between,
    check,
    check_duration,
    check_plaintext,
    file_option,
    split_address,
)
from specwire.config.flags import flag_name, option, same
from specwire.config.models import (
    EMBEDDED,
    EMULATED,
    check_adapters,
    check_inner,
    check_own,
    check_share,
)
from specwire.config.own_methods import DRAFT_MODEL, OWN_METHODS, Own, OwnFlags, named_own
from specwire.config.parts import (
    EngineConfig,
    ListenConfig,
    ModelConfig,
    ReportConfig,
    SpeculationConfig,
    TargetConfig,
)
from specwire.config.security.tls import TLS, Credentials
from specwire.config.speculative import INNER_METHODS
from specwire.core import MAX_AT_ONCE, MAX_NUM_OUTCOMES, MAX_SUPPORT, SUPPORT_MASS, Rule

ADDRESSES_HELP = "HOST:PORT of each replica, with commas, or dns:///NAME:PORT for all addresses of a name"
NO_SEED = -1
MOST_STREAMS = 1 << 20
"""gRPC takes counts below 2**31."""
_PAGE_LEN = 16
_CUDA_PAGE_LEN = 256


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(ListenConfig, ReportConfig):
    """What all three services share."""

    max_message_bytes: int = option(
        8 << 20, "largest message accepted, in bytes", check=between(4096, 2**31 - 1)
    )

    @property
    def capacity(self) -> tuple[int, int]:
        """Most streams that are served at a time, and most that wait; more are refused."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelServiceConfig(ServiceConfig, ModelConfig, EngineConfig):
    """What draft and verify service share: model and engine."""

    model: str = option(
        EMBEDDED, "directory or hub id of a transformers causal language model or encoder-decoder"
    )
    load_timeout_s: float = option(
        1800.0, "longest wait for several devices to load the model, in seconds", check=check_duration
    )
    step_timeout_s: float = option(
        60.0,
        "longest forward pass of several devices, or before it is known what passes cost, in seconds",
        check=check_duration,
    )
    kv_cache_memory: float = option(
        0.0, "fraction of the device's free memory for the KV cache, instead of --num-kv-tokens; 0 for none"
    )
    max_prefill_tokens: int = option(
        256, "most tokens of prompts in a pass that running streams wait for", check=at_least(1)
    )
    batch_invariant: bool = option(False, "compute a token bitwise the same in any batch")
    max_sequences: int = option(
        1024, "most open streams; others are told when to retry", check=between(1, MOST_STREAMS)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        source, _ = named_own(self.model)
        self._check(not source, "model", f"is no model: see the verify service's flag --{source}")
        is_shared = self.tensor_parallel_size > 1
        problem = "is of use with --tensor-parallel-size over 1 only"
        self._check(is_shared or not self.ray_address, "ray_address", problem)
        if is_shared:
            is_emulated = self.model.startswith(EMULATED)
            self._check(not is_emulated, "tensor_parallel_size", f"does not apply to {self.model}")
            problem = f"must be cpu or cuda with --tensor-parallel-size {self.tensor_parallel_size}"
            self._check(self.device in ("cpu", "cuda"), "device", problem)
        self._check(self.num_kv_tokens >= self.page_len, "num_kv_tokens", "is less than a page")
        for name in ("kv_cache_memory", "gpu_memory_utilization"):
            self._check(0 <= getattr(self, name) < 1, name, "must lie in [0, 1)")
        one = not (self.kv_cache_memory and self.gpu_memory_utilization)
        self._check(one, "gpu_memory_utilization", "does not go together with --kv-cache-memory")

    @property
    def capacity(self) -> tuple[int, int]:
        return self.max_sequences, 0

    @property
    def page_len(self) -> int:
        """Tokens in a page."""
        return self.page_size or (_CUDA_PAGE_LEN if self.device.startswith("cuda") else _PAGE_LEN)

    @property
    def num_pages(self) -> int:
        """Pages for `num_kv_tokens` tokens."""
        return self.num_kv_tokens // self.page_len

    @property
    def fills_memory(self) -> bool:
        """Whether the KV cache takes what the device has left, instead of `num_kv_tokens`."""
        return bool(self.kv_cache_memory or self.gpu_memory_utilization)

    @property
    def own(self) -> Own:
        """What a target drafts with by itself."""
        return Own()


@dataclass(frozen=True, kw_only=True)
class DraftConfig(ModelServiceConfig):
    """The draft service."""

    model: str = same(ModelServiceConfig, "model", alias="draft")
    support_mass: float = option(
        SUPPORT_MASS, "probability mass that a sent draft distribution keeps, in (0, 1]", check=check_share
    )
    max_support: int = option(
        MAX_SUPPORT,
        "most tokens in a sent draft distribution; a smaller one is sent whole",
        check=at_least(1),
    )
    max_outcomes: int = option(
        32,
        "most outcomes of a stream's round to work ahead on; 0 for none",
        check=between(0, MAX_NUM_OUTCOMES),
    )
    target_tokenizer: str = option(
        "",
        "directory or hub id of the target's tokenizer, for a draft with another one; empty for one with the "
        "same",
    )
    inner: str = option(
        "",
        f"what guesses the draft's own tokens, so that it takes fewer passes: {', '.join(INNER_METHODS)}, or "
        "a smaller model with its tokenizer; empty for none",
    )
    learn: bool = option(False, "let the draft learn from the target's tokens while it serves")
    learn_share: float = option(
        0.2,
        "most of the draft's time that learning may take while no request waits, in (0, 1]",
        check=check_share,
    )
    learn_rate: float = option(3e-4, "learning rate of --learn", check=check_duration)
    learn_shared: bool = option(
        False,
        "learn from requests with a bearer token or a cache_salt too; drafts that are rejected show them",
    )
    learn_out: str = option(
        "", "directory that --learn writes the draft to at the end; empty for none", needs=["learn"]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner:
            check_inner("inner", self.inner, self.model, self.tensor_parallel_size)
            problem = "does not guess for a draft with another vocabulary (--target-tokenizer)"
            self._check(not self.target_tokenizer, "inner", problem)
        alone = not self.target_tokenizer or self.tensor_parallel_size == 1
        self._check(alone, "target_tokenizer", "is served on one device only")
        out = self.learn_out
        is_itself = bool(out) and Path(out).resolve() == Path(self.model).resolve()
        self._check(not is_itself, "learn_out", "is --model itself")
        if not self.learn:
            return
        self._check(not self.model.startswith(EMULATED), "learn", f"{self.model} has no weights")
        for name in ("tensor_parallel_size", "batch_invariant", "target_tokenizer", "inner", "least_pass_ms"):
            is_default = getattr(self, name) == getattr(DraftConfig, name)
            self._check(is_default, name, "does not go together with --learn")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(ModelServiceConfig, TargetConfig, OwnFlags):
    """The verify service, or several of them."""

    model: str = same(ModelServiceConfig, "model", alias="target")

    @property
    def own(self) -> Own:
        return next(iter(self.given), Own())

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adapters(self.lora_modules, self.model, self.tensor_parallel_size)
        for own in self.given:
            name, value = own.source, getattr(self, own.source)
            self._check(own == self.own, name, f"does not go together with {flag_name(self.own.source)}")
            check_own(name, value, own, self.model, self.tensor_parallel_size)
            varies = own.source != DRAFT_MODEL and not OWN_METHODS[own.source].may_be_invariant
            fits = not (varies and self.batch_invariant)
            self._check(fits, name, "does not go together with --batch-invariant")
        ports, problem = {}, f"leaves no room for the ports of {self.replicas} replicas"
        for name in ("address", "metrics_address"):
            if address := getattr(self, name):
                ports[name] = _, port = split_address(name, address)
                self._check(port + self.replicas <= 65536, name, problem)
        (host, port), (metrics_host, metrics_port) = ports["address"], ports.get("metrics_address", ("", 0))
        apart = host != metrics_host or not port * metrics_port or abs(port - metrics_port) >= self.replicas
        self._check(apart, "metrics_address", "is among the ports of --address")


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(ServiceConfig, SpeculationConfig):
    """The coordinator."""

    draft_address: str = option("", f"where the draft service is: {ADDRESSES_HELP}; empty decodes plainly")
    verify_address: str = option("127.0.0.1:7072", f"where the verify service is: {ADDRESSES_HELP}")
    seed: int = option(
        NO_SEED,
        "seed of the seeds of requests without one, in order of arrival, so that a run can be repeated; "
        f"{NO_SEED} draws them at random",
        check=at_least(NO_SEED),
    )
    draft_timeout_ms: float = option(
        1000.0,
        "longest wait for a proposal before a plain round, or 8 times what proposals cost; a draft silent "
        "for 5 times as long is lost",
        check=check_duration,
    )
    workers: int = same(HttpConfig, "workers")
    max_running: int = option(
        256,
        "most generations at a time; others wait",
        alias="max_num_seqs",
        check=between(1, MAX_AT_ONCE),
    )
    max_waiting: int = option(
        1024, "most generations that wait; others are told when to retry", check=between(0, MOST_STREAMS)
    )
    idle_timeout_s: float = option(
        60.0,
        "longest time that a client may take no token that waits for it, in seconds; then its stream ends, "
        "and can be resumed",
        check=check_duration,
    )
    max_prompt_bytes: int = same(HttpConfig, "max_prompt_bytes")
    connect_timeout_s: float = option(
        60.0,
        "longest wait for a verify service at start, in seconds; one that loads its model is waited for",
        check=check_duration,
    )
    failover_timeout_s: float = option(
        5.0, "longest wait of a running generation for a verify service, in seconds", check=check_duration
    )
    tokenizer: str = option("", "directory or hub id of the tokenizer; empty asks the verify service")
    peer_ca: str = file_option(
        "PEM certificates of the authorities that draft and verify are verified against; empty for plaintext"
    )
    peer_cert: str = file_option(
        "PEM certificate of the coordinator, for mutual TLS with draft and verify", "peer_key", "peer_ca"
    )
    peer_key: str = file_option("PEM private key of --peer-cert", "peer_cert")
    peer_server_name: str = option(
        "", "name in the certificates of draft and verify; empty for their hosts", needs=["peer_ca"]
    )
    peer_token_file: str = file_option("file with the bearer token for draft and verify")

    def __post_init__(self) -> None:
        super().__post_init__()
        if given := self.own_draft:
            problem = f"is the verify service's flag --{given.source}"
            check(not given.model, "speculative_config", f"model={given.model!r}", problem)
        alone = self.seed == NO_SEED or self.workers == 1
        self._check(alone, "seed", "does not go together with several --workers, whose order is open")
        allowed = bool(self.peer_ca) or self.allow_plaintext
        check_plaintext("verify_address", self.verify_address, allowed=allowed, remedy="give --peer-ca")
        if self.draft_address:
            check_plaintext("draft_address", self.draft_address, allowed=allowed, remedy="give --peer-ca")

    @property
    def capacity(self) -> tuple[int, int]:
        return self.max_running, self.max_waiting

    @property
    def peer_credentials(self) -> Credentials:
        """Credentials for draft and verify, and what they are verified against."""
        tls = TLS(ca=self.peer_ca, cert=self.peer_cert, key=self.peer_key, server_name=self.peer_server_name)
        return Credentials(
            tls=tls if self.peer_ca else None,
            token_file=self.peer_token_file,
            allow_plaintext=self.allow_plaintext,
        )

    @functools.cached_property
    def fixed_draft_tokens(self) -> int | None:
        """Draft tokens a round of requests that name no number; None chooses it in each round."""
        given = self.num_draft_tokens
        return self.model_draft.num_speculative_tokens if given == AUTO else int(given)

    @functools.cached_property
    def fixed_max_depth(self) -> int | None:
        """Longest path of a tree for requests that leave it open, 0 for chains; None finds out what pays."""
        return self.model_draft.max_depth if self.max_depth == AUTO else int(self.max_depth)

    @functools.cached_property
    def fixed_outcomes(self) -> int | None:
        """Outcomes to prepare for; None chooses by measured benefit."""
        return None if self.num_outcomes == AUTO else int(self.num_outcomes)

    @property
    def fixed_rule(self) -> Rule | None:
        """Rule of requests that name none; None chooses it for each request."""
        return None if self.rule == AUTO else Rule(self.rule)


@dataclass(frozen=True, kw_only=True)
class CoordinatorCommand(CoordinatorConfig):
    """`specwire coordinator`."""

    address: str = same(ListenConfig, "address", "127.0.0.1:7070")


@dataclass(frozen=True, kw_only=True)
class DraftCommand(DraftConfig):
    """`specwire draft`."""

    address: str = same(ListenConfig, "address", "127.0.0.1:7071")


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(VerifyConfig):
    """`specwire verify`."""

    address: str = same(ListenConfig, "address", "127.0.0.1:7072")
