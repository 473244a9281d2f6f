"""Configuration of the services, and of stacks of them; `client_config.py` has that of their clients.

Flags and `SPECWIRE_*` variables come from these fields (`flags.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.config.client import ClientConfig, HttpConfig
from specwire.config.fields import (
    ALLOW_PLAINTEXT_HELP,
    AUTO,
    DNS,
    TLS_CERT_HELP,
    TLS_KEY_HELP,
    check,
    check_amount,
    check_choice,
    check_duration,
    check_file,
    check_log_level,
    check_pair,
    check_plaintext,
    parse_count,
    split_address,
    split_addresses,
)
from specwire.config.flags import option, refuse_unknown_variables
from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_NUM_OUTCOMES, Rule
from specwire.security.tls import TLS, Credentials

EMBEDDED = "embedded"
EMULATED = "emulated:"
NO_DRAFT = "none"
DTYPES = ("auto", "float32", "bfloat16", "float16")
RULES = (AUTO, *Rule)
RULE_HELP = "rule of requests that name none; auto takes gumbel for a given seed or a far draft"
NUM_OUTCOMES_HELP = "outcomes of a round that the draft prepares for: a number, or auto for what pays"
NUM_DRAFT_TOKENS_HELP = "draft tokens a round when a request does not say: a number, or auto for what pays"
TLS_CLIENT_CA_HELP = "PEM authorities; clients must show a certificate of theirs"
TOKENS_HELP = "file of bearer tokens, as `specwire token` makes them; clients must show one"
ADDRESSES_HELP = "HOST:PORT of each replica, with commas, or dns:///NAME:PORT for all addresses of a name"
IDLE_TIMEOUT_HELP = (
    "longest time that a client may take no token that waits for it, in seconds; then its stream ends, "
    "and can be resumed"
)
LEAST_PASS_HELP = (
    "least milliseconds a forward pass takes, as a bigger model's would; the rest is slept; 0: none"
)
UP_METRICS_HELP = "HOST:PORT of the coordinator's /metrics; draft and verify take the next two ports"
DRAFT_TIMEOUT_HELP = (
    "longest wait for a proposal before a plain round, or 8 times what proposals cost; a draft silent for "
    "5 times as long is lost"
)
STEP_TIMEOUT_HELP = (
    "longest forward pass of several devices, or before anything is known of what passes cost, in seconds"
)
_PAGE_LEN = 16
_CUDA_PAGE_LEN = 256
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def parse_num_draft_tokens(value: str) -> int | None:
    """A number of draft tokens; None for `auto`.

    Raises:
        ConfigError: naming the flag and the value.
    """
    return parse_count("num_draft_tokens", value, MAX_NUM_DRAFT_TOKENS)


def parse_num_outcomes(value: str) -> int | None:
    """A number of outcomes to prepare for; None for `auto`. Errors as for `parse_num_draft_tokens`."""
    return parse_count("num_outcomes", value, MAX_NUM_OUTCOMES)


def _check_group(num_ranks: int, ray_address: str, model: str, device: str) -> None:
    name = "tensor_parallel_size"
    check(num_ranks >= 1, name, num_ranks, "must be at least 1")
    if num_ranks == 1:
        check(
            not ray_address, "ray_address", ray_address, "is of use with --tensor-parallel-size over 1 only"
        )
        return
    check(not model.startswith(EMULATED), name, num_ranks, f"does not apply to {model}")
    placed = device in ("cpu", "cuda")
    check(placed, "device", device, f"must be cpu or cuda with --tensor-parallel-size {num_ranks}")


def check_model(name: str, source: str) -> None:
    """Whether this may name a model; a hub id is only known to be good when it is loaded.

    Raises:
        ConfigError: naming the flag and the source.
    """
    is_path = Path(source).exists() or not _HUB_ID.fullmatch(source)
    ok = (
        source == EMBEDDED
        or source.startswith(EMULATED)
        or (source != "" and Path(source).is_dir())
        or not is_path
    )
    check(ok, name, source, "no such model directory")


@dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Who may come in at an address: TLS and tokens, from files that are read again when they change."""

    address: str = option("127.0.0.1:0", "HOST:PORT to listen on; port 0 picks a free one")
    tls_cert: str = option("", TLS_CERT_HELP, metavar="FILE")
    tls_key: str = option("", TLS_KEY_HELP, metavar="FILE")
    tls_client_ca: str = option("", TLS_CLIENT_CA_HELP, metavar="FILE")
    tokens: str = option("", TOKENS_HELP, metavar="FILE")
    allow_plaintext: bool = option(False, ALLOW_PLAINTEXT_HELP)

    def __post_init__(self) -> None:
        for name in ("tls_cert", "tls_key", "tls_client_ca", "tokens"):
            check_file(name, getattr(self, name))
        check_pair("tls_cert", self.tls_cert, "tls_key", self.tls_key)
        encrypted = bool(self.tls_cert)
        ca = self.tls_client_ca
        check(encrypted or not ca, "tls_client_ca", ca, "is of use together with --tls-cert only")
        check_plaintext("address", self.address, allowed=encrypted or self.allow_plaintext)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(ListenConfig):
    """What all three services share."""

    grace_s: float = option(10.0, "seconds that running requests get to finish at shutdown")
    max_message_bytes: int = option(8 << 20, "largest message accepted, in bytes")
    log_level: str = option("warning", "least severe log records shown on standard error")
    metrics_address: str = option("", "HOST:PORT for Prometheus to scrape /metrics at; empty for none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metrics_address:
            split_address("metrics_address", self.metrics_address)
        check_amount("grace_s", self.grace_s)
        check(
            self.max_message_bytes >= 4096,
            "max_message_bytes",
            self.max_message_bytes,
            "must be at least 4096",
        )
        check_log_level(self.log_level)

    @property
    def capacity(self) -> tuple[int, int]:
        """Most streams that are served at a time, and most that wait; more are refused."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelServiceConfig(ServiceConfig):
    """What draft and verify service share: the model and its engine."""

    model: str = option(EMBEDDED, "directory or hub id of a transformers causal language model")
    dtype: str = option("auto", "number format of the weights: auto, float32, bfloat16 or float16")
    device: str = option("cpu", "device the model runs on, as torch names it")
    num_threads: int = option(0, "CPU threads for the model; 0 leaves it to torch")
    tensor_parallel_size: int = option(1, "devices that share the model, placed by Ray; 1 needs no Ray")
    ray_address: str = option("", "Ray cluster to place them in; empty starts one on this machine")
    load_timeout_s: float = option(1800.0, "longest wait for several devices to load the model, in seconds")
    step_timeout_s: float = option(60.0, STEP_TIMEOUT_HELP)
    num_kv_tokens: int = option(65536, "size of the KV cache, in tokens over all sequences")
    kv_cache_memory: float = option(
        0.0, "fraction of the device's free memory for the KV cache, instead of --num-kv-tokens; 0 for none"
    )
    page_size: int = option(0, "tokens in a page of the KV cache; 0 for 16, and 256 on CUDA for its kernels")
    prefix_sharing: bool = option(True, "find pages of the KV cache again by their tokens")
    max_num_tokens: int = option(2048, "most tokens in one forward pass")
    max_prefill_tokens: int = option(256, "most tokens of prompts in a pass that running streams wait for")
    cuda_graphs: bool = option(True, "on CUDA, record passes of usual sizes and replay them")
    batch_invariant: bool = option(False, "compute a token bitwise the same whatever else is in its pass")
    max_sequences: int = option(1024, "most open streams; others are told when to come back")
    least_pass_ms: float = option(0.0, LEAST_PASS_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount("least_pass_ms", self.least_pass_ms)
        check_choice("dtype", self.dtype, DTYPES)
        check(self.num_threads >= 0, "num_threads", self.num_threads, "must be at least 0")
        _check_group(self.tensor_parallel_size, self.ray_address, self.model, self.device)
        alone = self.tensor_parallel_size == 1 or not self.batch_invariant
        check(alone, "batch_invariant", self.batch_invariant, "is served on one device only")
        check_duration("load_timeout_s", self.load_timeout_s)
        check_duration("step_timeout_s", self.step_timeout_s)
        check(self.page_size >= 0, "page_size", self.page_size, "must be at least 0")
        num_kv_tokens = self.num_kv_tokens
        check(num_kv_tokens >= self.page_len, "num_kv_tokens", num_kv_tokens, "is less than a page")
        fraction = self.kv_cache_memory
        check(0 <= fraction < 1, "kv_cache_memory", fraction, "must lie in [0, 1)")
        check(self.max_sequences >= 1, "max_sequences", self.max_sequences, "must be at least 1")
        least = MAX_NUM_DRAFT_TOKENS + 1
        check(
            self.max_num_tokens >= least, "max_num_tokens", self.max_num_tokens, f"must be at least {least}"
        )
        at_least_one = "must be at least 1"
        check(self.max_prefill_tokens >= 1, "max_prefill_tokens", self.max_prefill_tokens, at_least_one)

    @property
    def capacity(self) -> tuple[int, int]:
        """See `ServiceConfig`."""
        return self.max_sequences, 0

    @property
    def page_len(self) -> int:
        """Tokens in a page."""
        return self.page_size or (_CUDA_PAGE_LEN if self.device.startswith("cuda") else _PAGE_LEN)

    @property
    def num_pages(self) -> int:
        """Pages that `num_kv_tokens` stands for."""
        return self.num_kv_tokens // self.page_len


@dataclass(frozen=True, kw_only=True)
class DraftConfig(ModelServiceConfig):
    """The draft service."""

    support_mass: float = option(0.99, "probability mass that a sent draft distribution keeps, in (0, 1]")
    max_support: int = option(256, "most tokens in a sent draft distribution; all are sent as long as that")
    max_outcomes: int = option(32, "most outcomes of a stream's round to work ahead on; 0 for none")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 < self.support_mass <= 1, "support_mass", self.support_mass, "must lie in (0, 1]")
        check(self.max_support >= 1, "max_support", self.max_support, "must be at least 1")
        most = MAX_NUM_OUTCOMES
        check(0 <= self.max_outcomes <= most, "max_outcomes", self.max_outcomes, f"must lie in [0, {most}]")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(ModelServiceConfig):
    """The verify service, or several of them."""

    replicas: int = option(
        1, "verify services to run, each with the whole model and a port of its own, from --address's on"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.replicas >= 1, "replicas", self.replicas, "must be at least 1")
        ports = {
            name: split_address(name, getattr(self, name))
            for name in ("address", "metrics_address")
            if getattr(self, name)
        }
        for name, (_, port) in ports.items():
            room = port + self.replicas <= 65536
            check(
                room, name, getattr(self, name), f"leaves no room for the ports of {self.replicas} replicas"
            )
        (host, port), (metrics_host, metrics_port) = ports["address"], ports.get("metrics_address", ("", 0))
        apart = host != metrics_host or not port * metrics_port or abs(port - metrics_port) >= self.replicas
        check(apart, "metrics_address", self.metrics_address, "is among the ports of --address")


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(ServiceConfig):
    """The coordinator."""

    draft_address: str = option("", f"where the draft service is: {ADDRESSES_HELP}; empty decodes plainly")
    verify_address: str = option("127.0.0.1:7072", f"where the verify service is: {ADDRESSES_HELP}")
    num_draft_tokens: str = option(AUTO, NUM_DRAFT_TOKENS_HELP)
    num_outcomes: str = option(AUTO, NUM_OUTCOMES_HELP)
    rule: str = option(AUTO, RULE_HELP)
    draft_timeout_ms: float = option(1000.0, DRAFT_TIMEOUT_HELP)
    max_running: int = option(256, "most generations at a time; others wait")
    max_waiting: int = option(1024, "most generations that wait; others are told when to come back")
    idle_timeout_s: float = option(60.0, IDLE_TIMEOUT_HELP)
    max_prompt_bytes: int = option(1 << 20, "most bytes of a prompt as text, or of its messages together")
    connect_timeout_s: float = option(60.0, "longest wait for the verify service at start")
    failover_timeout_s: float = option(
        5.0, "longest wait of a running generation for a verify service, in seconds"
    )
    tokenizer: str = option("", "directory or hub id of the tokenizer; empty asks the verify service")
    peer_ca: str = option(
        "", "PEM authorities that vouch for draft and verify; empty for plaintext", metavar="FILE"
    )
    peer_cert: str = option("", "PEM certificate shown to draft and verify", metavar="FILE")
    peer_key: str = option("", "PEM private key of --peer-cert", metavar="FILE")
    peer_server_name: str = option("", "name in the certificates of draft and verify; empty for their hosts")
    peer_token_file: str = option("", "file with the bearer token shown to draft and verify", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_peers()
        most = self.max_prompt_bytes
        check(most >= 1, "max_prompt_bytes", most, "must be at least 1")
        parse_num_draft_tokens(self.num_draft_tokens)
        parse_num_outcomes(self.num_outcomes)
        check_choice("rule", self.rule, RULES)
        check_duration("draft_timeout_ms", self.draft_timeout_ms)
        check_duration("connect_timeout_s", self.connect_timeout_s)
        check_duration("failover_timeout_s", self.failover_timeout_s)
        check_duration("idle_timeout_s", self.idle_timeout_s)

    @property
    def capacity(self) -> tuple[int, int]:
        """See `ServiceConfig`."""
        return self.max_running, self.max_waiting

    def _check_peers(self) -> None:
        for name in ("peer_ca", "peer_cert", "peer_key", "peer_token_file"):
            check_file(name, getattr(self, name))
        check_pair("peer_cert", self.peer_cert, "peer_key", self.peer_key)
        for name in ("peer_cert", "peer_server_name"):
            value = getattr(self, name)
            check(bool(self.peer_ca) or not value, name, value, "is of use together with --peer-ca only")
        allowed = bool(self.peer_ca) or self.allow_plaintext
        for name in ("verify_address", "draft_address"):
            addresses = getattr(self, name)
            for entry in split_addresses(name, addresses) if addresses or name == "verify_address" else ():
                check_plaintext(name, entry.removeprefix(DNS), allowed=allowed)

    @property
    def peer_credentials(self) -> Credentials:
        """What is shown to draft and verify, and expected of them."""
        tls = TLS(ca=self.peer_ca, cert=self.peer_cert, key=self.peer_key, server_name=self.peer_server_name)
        return Credentials(
            tls=tls if self.peer_ca else None,
            token_file=self.peer_token_file,
            allow_plaintext=self.allow_plaintext,
        )

    @property
    def fixed_draft_tokens(self) -> int | None:
        """Draft tokens a round when a request does not say; None chooses them in each round."""
        return parse_num_draft_tokens(self.num_draft_tokens)

    @property
    def fixed_outcomes(self) -> int | None:
        """Outcomes to prepare for; None finds out what pays."""
        return parse_num_outcomes(self.num_outcomes)

    @property
    def fixed_rule(self) -> Rule | None:
        """Rule of requests that name none; None chooses it for each."""
        return None if self.rule == AUTO else Rule(self.rule)


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The three services on this machine."""

    target: str = option(EMBEDDED, "directory or hub id of the target model")
    draft: str = option(EMBEDDED, "directory or hub id of the draft model; none decodes plainly")
    dtype: str = option("auto", "number format of the target's weights")
    device: str = option("cpu", "device of the target")
    tensor_parallel_size: int = option(1, "devices that share the target, placed by Ray; 1 needs no Ray")
    ray_address: str = option("", "Ray cluster to place them in; empty starts one on this machine")
    replicas: int = option(
        1, "verify services, each with the whole target; on cuda each on a card of its own"
    )
    draft_dtype: str = option("auto", "number format of the draft's weights")
    draft_device: str = option("cpu", "device of the draft")
    address: str = option("127.0.0.1:7070", "HOST:PORT the coordinator listens on; port 0 picks a free one")
    http_address: str = option("", "HOST:PORT for OpenAI's API and the page; empty serves neither")
    num_draft_tokens: str = option(AUTO, NUM_DRAFT_TOKENS_HELP)
    num_outcomes: str = option(AUTO, NUM_OUTCOMES_HELP)
    rule: str = option(AUTO, RULE_HELP)
    draft_rtt_ms: float = option(0.0, "round trip to emulate between coordinator and draft, in milliseconds")
    num_kv_tokens: int = option(65536, "size of each KV cache, in tokens over all sequences")
    prefix_sharing: bool = option(True, "find pages of the KV caches again by their tokens")
    least_pass_ms: float = option(0.0, f"of the target: {LEAST_PASS_HELP}")
    num_threads: int = option(0, "CPU threads for the target; 0 leaves it to torch")
    draft_num_threads: int = option(1, "CPU threads for the draft; 0 leaves it to torch")
    start_timeout_s: float = option(300.0, "longest wait for the services to be ready")
    grace_s: float = option(10.0, "seconds that running requests get to finish at shutdown")
    log_level: str = option("warning", "least severe log records shown on standard error")
    metrics_address: str = option("", UP_METRICS_HELP)

    def __post_init__(self) -> None:
        """Refuse here what a service would only refuse seconds later, and under another flag's name."""
        split_address("address", self.address)
        if self.http_address:
            split_address("http_address", self.http_address)
        check_model("target", self.target)
        if self.draft != NO_DRAFT:
            check_model("draft", self.draft)
            fits = self.draft != EMBEDDED or self.target == EMBEDDED
            check(fits, "draft", self.draft, f"does not fit --target {self.target}; name a draft, or none")
        _check_group(self.tensor_parallel_size, self.ray_address, self.target, self.device)
        check(self.replicas >= 1, "replicas", self.replicas, "must be at least 1")
        placed = self.replicas == 1 or self.tensor_parallel_size == 1 or self.ray_address != ""
        check(placed, "replicas", self.replicas, "need --ray-address where each spans several devices")
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("draft_dtype", self.draft_dtype, DTYPES)
        check_log_level(self.log_level)
        if self.metrics_address:
            _, port = split_address("metrics_address", self.metrics_address)
            check(port < 65534, "metrics_address", self.metrics_address, "leaves no room for two more ports")
        parse_num_draft_tokens(self.num_draft_tokens)
        parse_num_outcomes(self.num_outcomes)
        check_choice("rule", self.rule, RULES)
        check_amount("draft_rtt_ms", self.draft_rtt_ms)
        check_amount("least_pass_ms", self.least_pass_ms)
        check(self.num_kv_tokens >= 1, "num_kv_tokens", self.num_kv_tokens, "must be at least 1")
        check(self.draft_num_threads >= 0, "draft_num_threads", self.draft_num_threads, "must be at least 0")
        check(self.num_threads >= 0, "num_threads", self.num_threads, "must be at least 0")
        check_duration("start_timeout_s", self.start_timeout_s)
        check_amount("grace_s", self.grace_s)


@dataclass(frozen=True, kw_only=True)
class UpConfig(StackConfig, ListenConfig):
    """`specwire up`: the doors are the coordinator's. The model services listen on loopback; with
    `tokens` they ask for one that is made at start."""

    address: str = option("127.0.0.1:7070", "HOST:PORT the coordinator listens on; port 0 picks a free one")

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        ListenConfig.__post_init__(self)
        if self.http_address:
            check_plaintext("http_address", self.http_address, allowed=self.allow_plaintext)
            problem = "speaks plaintext to the coordinator; with --tls-cert, start `specwire http` by itself"
            check(not self.tls_cert, "http_address", self.http_address, problem)


@dataclass(frozen=True, kw_only=True)
class LiveConfig(StackConfig):
    """`specwire timeline --live`: a free port, and too short for trying out which length pays."""

    address: str = option("127.0.0.1:0", "HOST:PORT the coordinator listens on; port 0 picks a free one")
    num_draft_tokens: str = option("4", NUM_DRAFT_TOKENS_HELP)


@dataclass(frozen=True, kw_only=True)
class DemoConfig(LiveConfig):
    """`specwire demo`: a target as slow as a large one, and the rule that repeats a text."""

    num_draft_tokens: str = option("6", NUM_DRAFT_TOKENS_HELP)
    least_pass_ms: float = option(30.0, f"of the target: {LEAST_PASS_HELP}")
    rule: str = option(Rule.GUMBEL.value, RULE_HELP)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a `delay_proxy.DelayProxy` adds to the bytes that pass through it."""

    rtt_ms: float = option(0.0, "round trip in milliseconds; half of it is added each way")
    jitter_ms: float = option(0.0, "most that the delay of one way is off, in ms either way; at most rtt / 2")
    bandwidth_mbps: float = option(
        0.0, "megabits a second each way, all connections together; 0 for no limit"
    )
    seed: int = option(0, "seed of the jitter")

    def __post_init__(self) -> None:
        for name in ("rtt_ms", "jitter_ms", "bandwidth_mbps"):
            check_amount(name, getattr(self, name))
        most = self.rtt_ms / 2
        check(
            self.jitter_ms <= most, "jitter_ms", self.jitter_ms, f"is more than half the round trip, {most}"
        )

    @property
    def bytes_per_s(self) -> float:
        """Bytes that leave in a second, each way; infinite without a limit."""
        return self.bandwidth_mbps * 1e6 / 8 or math.inf


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(Link):
    """`specwire proxy`: a link with two ends."""

    listen: str = option("127.0.0.1:0", "HOST:PORT to listen on; port 0 picks a free one")
    to: str = option("127.0.0.1:7071", "HOST:PORT of the service at the other end")

    def __post_init__(self) -> None:
        super().__post_init__()
        split_address("listen", self.listen)
        split_address("to", self.to)


ALL_CONFIGS: tuple[type[Any], ...] = (
    DraftConfig,
    VerifyConfig,
    CoordinatorConfig,
    UpConfig,
    ClientConfig,
    HttpConfig,
    ProxyConfig,
)


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse `SPECWIRE_*` variables that no process reads."""
    refuse_unknown_variables(ALL_CONFIGS, environ)
