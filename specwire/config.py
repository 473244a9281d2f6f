"""Configuration of every process. Flags and `SPECWIRE_*` variables come from these fields (`flags.py`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_NUM_OUTCOMES, Rule
from specwire.errors import ConfigError
from specwire.flags import flag_name, option, refuse_unknown_variables

EMBEDDED = "embedded"
EMULATED = "emulated:"
NO_DRAFT = "none"
AUTO = "auto"
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOG_LEVELS = ("debug", "info", "warning", "error")
RULES = (AUTO, *Rule)
RULE_HELP = "rule of requests that name none; auto takes gumbel for a given seed or a far draft"
NUM_OUTCOMES_HELP = "outcomes of a round that the draft prepares for: a number, or auto for what pays"
NUM_DRAFT_TOKENS_HELP = "draft tokens a round when a request does not say: a number, or auto for what pays"
_PAGE_LEN = 16
_CUDA_PAGE_LEN = 256
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def _check(ok: bool, name: str, value: object, problem: str) -> None:
    if not ok:
        raise ConfigError(f"{flag_name(name)} {value}: {problem}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    _check(value in choices, name, value, f"is not one of {', '.join(choices)}")


def parse_num_draft_tokens(value: str) -> int | None:
    """A number of draft tokens; None for `auto`.

    Raises:
        ConfigError: naming the flag and the value.
    """
    return _parse_count("num_draft_tokens", value, MAX_NUM_DRAFT_TOKENS)


def parse_num_outcomes(value: str) -> int | None:
    """A number of outcomes to prepare for; None for `auto`. Errors as for `parse_num_draft_tokens`."""
    return _parse_count("num_outcomes", value, MAX_NUM_OUTCOMES)


def _parse_count(name: str, value: str, limit: int) -> int | None:
    if value == AUTO:
        return None
    _check(re.fullmatch(r"-?[0-9]+", value) is not None, name, value, f"is neither a number nor {AUTO}")
    _check(0 <= int(value) <= limit, name, value, f"must lie in [0, {limit}]")
    return int(value)


def _check_duration(name: str, value: float) -> None:
    _check(0 < value < math.inf, name, value, "must be a finite number over 0")


def _check_group(num_ranks: int, ray_address: str, model: str, device: str) -> None:
    name = "tensor_parallel_size"
    _check(num_ranks >= 1, name, num_ranks, "must be at least 1")
    if num_ranks == 1:
        _check(
            not ray_address, "ray_address", ray_address, "is of use with --tensor-parallel-size over 1 only"
        )
        return
    _check(not model.startswith(EMULATED), name, num_ranks, f"does not apply to {model}")
    placed = device in ("cpu", "cuda")
    _check(placed, "device", device, f"must be cpu or cuda with --tensor-parallel-size {num_ranks}")


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
    _check(ok, name, source, "no such model directory")


def split_address(name: str, address: str) -> tuple[str, int]:
    """`HOST:PORT` to its parts; `[::1]:7070` works too.

    Raises:
        ConfigError: naming the flag and the address.
    """
    host, _, port = address.rpartition(":")
    ok = bool(host) and port.isascii() and port.isdecimal() and int(port) < 65536
    _check(ok, name, address, "is not HOST:PORT")
    return host, int(port)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What all three services share."""

    address: str = option("127.0.0.1:0", "HOST:PORT to listen on; port 0 picks a free one")
    grace_s: float = option(10.0, "seconds that running requests get to finish at shutdown")
    max_message_bytes: int = option(8 << 20, "largest message accepted, in bytes")
    log_level: str = option("warning", "least severe log records shown on standard error")

    def __post_init__(self) -> None:
        split_address("address", self.address)
        _check(0 <= self.grace_s < math.inf, "grace_s", self.grace_s, "must be a finite number, at least 0")
        _check(
            self.max_message_bytes >= 4096,
            "max_message_bytes",
            self.max_message_bytes,
            "must be at least 4096",
        )
        _check_choice("log_level", self.log_level, LOG_LEVELS)


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
    step_timeout_s: float = option(60.0, "longest forward pass of several devices, in seconds")
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

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("dtype", self.dtype, DTYPES)
        _check(self.num_threads >= 0, "num_threads", self.num_threads, "must be at least 0")
        _check_group(self.tensor_parallel_size, self.ray_address, self.model, self.device)
        alone = self.tensor_parallel_size == 1 or not self.batch_invariant
        _check(alone, "batch_invariant", self.batch_invariant, "is served on one device only")
        _check_duration("load_timeout_s", self.load_timeout_s)
        _check_duration("step_timeout_s", self.step_timeout_s)
        _check(self.page_size >= 0, "page_size", self.page_size, "must be at least 0")
        num_kv_tokens = self.num_kv_tokens
        _check(num_kv_tokens >= self.page_len, "num_kv_tokens", num_kv_tokens, "is less than a page")
        fraction = self.kv_cache_memory
        _check(0 <= fraction < 1, "kv_cache_memory", fraction, "must lie in [0, 1)")
        _check(self.max_sequences >= 1, "max_sequences", self.max_sequences, "must be at least 1")
        least = MAX_NUM_DRAFT_TOKENS + 1
        _check(
            self.max_num_tokens >= least, "max_num_tokens", self.max_num_tokens, f"must be at least {least}"
        )
        at_least_one = "must be at least 1"
        _check(self.max_prefill_tokens >= 1, "max_prefill_tokens", self.max_prefill_tokens, at_least_one)

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
    max_support: int = option(1024, "most tokens in a sent draft distribution")
    max_outcomes: int = option(32, "most outcomes of a stream's round to work ahead on; 0 for none")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(0 < self.support_mass <= 1, "support_mass", self.support_mass, "must lie in (0, 1]")
        _check(self.max_support >= 1, "max_support", self.max_support, "must be at least 1")
        most = MAX_NUM_OUTCOMES
        _check(0 <= self.max_outcomes <= most, "max_outcomes", self.max_outcomes, f"must lie in [0, {most}]")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(ModelServiceConfig):
    """The verify service."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(ServiceConfig):
    """The coordinator."""

    draft_address: str = option("", "HOST:PORT of the draft service; empty decodes plainly")
    verify_address: str = option("127.0.0.1:7072", "HOST:PORT of the verify service")
    num_draft_tokens: str = option(AUTO, NUM_DRAFT_TOKENS_HELP)
    num_outcomes: str = option(AUTO, NUM_OUTCOMES_HELP)
    rule: str = option(AUTO, RULE_HELP)
    draft_timeout_ms: float = option(5000.0, "longest wait for a proposal before decoding plainly")
    max_running: int = option(256, "most generations at a time; others wait")
    max_waiting: int = option(1024, "most generations that wait; others are told when to come back")
    connect_timeout_s: float = option(60.0, "longest wait for the verify service at start")
    tokenizer: str = option("", "directory or hub id of the tokenizer; empty asks the verify service")

    def __post_init__(self) -> None:
        super().__post_init__()
        split_address("verify_address", self.verify_address)
        if self.draft_address:
            split_address("draft_address", self.draft_address)
        parse_num_draft_tokens(self.num_draft_tokens)
        parse_num_outcomes(self.num_outcomes)
        _check_choice("rule", self.rule, RULES)
        _check_duration("draft_timeout_ms", self.draft_timeout_ms)
        _check_duration("connect_timeout_s", self.connect_timeout_s)

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
class UpConfig:
    """`specwire up` and `specwire demo`: the three services on this machine."""

    target: str = option(EMBEDDED, "directory or hub id of the target model")
    draft: str = option(EMBEDDED, "directory or hub id of the draft model; none decodes plainly")
    dtype: str = option("auto", "number format of the target's weights")
    device: str = option("cpu", "device of the target")
    tensor_parallel_size: int = option(1, "devices that share the target, placed by Ray; 1 needs no Ray")
    ray_address: str = option("", "Ray cluster to place them in; empty starts one on this machine")
    draft_dtype: str = option("auto", "number format of the draft's weights")
    draft_device: str = option("cpu", "device of the draft")
    address: str = option("127.0.0.1:7070", "HOST:PORT the coordinator listens on; port 0 picks a free one")
    num_draft_tokens: str = option(AUTO, NUM_DRAFT_TOKENS_HELP)
    num_outcomes: str = option(AUTO, NUM_OUTCOMES_HELP)
    rule: str = option(AUTO, RULE_HELP)
    draft_rtt_ms: float = option(0.0, "round trip to emulate between coordinator and draft, in milliseconds")
    num_kv_tokens: int = option(65536, "size of each KV cache, in tokens over all sequences")
    prefix_sharing: bool = option(True, "find pages of the KV caches again by their tokens")
    num_threads: int = option(0, "CPU threads for the target; 0 leaves it to torch")
    draft_num_threads: int = option(1, "CPU threads for the draft; 0 leaves it to torch")
    start_timeout_s: float = option(300.0, "longest wait for the services to be ready")
    grace_s: float = option(10.0, "seconds that running requests get to finish at shutdown")
    log_level: str = option("warning", "least severe log records shown on standard error")

    def __post_init__(self) -> None:
        """Refuse here what a service would only refuse seconds later, and under another flag's name."""
        split_address("address", self.address)
        check_model("target", self.target)
        if self.draft != NO_DRAFT:
            check_model("draft", self.draft)
            fits = self.draft != EMBEDDED or self.target == EMBEDDED
            _check(fits, "draft", self.draft, f"does not fit --target {self.target}; name a draft, or none")
        _check_group(self.tensor_parallel_size, self.ray_address, self.target, self.device)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("draft_dtype", self.draft_dtype, DTYPES)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        parse_num_draft_tokens(self.num_draft_tokens)
        parse_num_outcomes(self.num_outcomes)
        _check_choice("rule", self.rule, RULES)
        far = 0 <= self.draft_rtt_ms < math.inf
        _check(far, "draft_rtt_ms", self.draft_rtt_ms, "must be a finite number, at least 0")
        _check(self.num_kv_tokens >= 1, "num_kv_tokens", self.num_kv_tokens, "must be at least 1")
        _check(self.draft_num_threads >= 0, "draft_num_threads", self.draft_num_threads, "must be at least 0")
        _check(self.num_threads >= 0, "num_threads", self.num_threads, "must be at least 0")
        _check_duration("start_timeout_s", self.start_timeout_s)
        _check(0 <= self.grace_s < math.inf, "grace_s", self.grace_s, "must be a finite number, at least 0")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(UpConfig):
    """`specwire up` on a free port, and too short for trying out which length pays."""

    address: str = option("127.0.0.1:0", "HOST:PORT the coordinator listens on; port 0 picks a free one")
    num_draft_tokens: str = option("4", NUM_DRAFT_TOKENS_HELP)


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Where `specwire generate` finds the coordinator."""

    server: str = option("127.0.0.1:7070", "HOST:PORT of the coordinator")
    timeout_s: float = option(120.0, "deadline of the whole generation, in seconds")

    def __post_init__(self) -> None:
        split_address("server", self.server)
        _check_duration("timeout_s", self.timeout_s)


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
            value = getattr(self, name)
            _check(0 <= value < math.inf, name, value, "must be a finite number, at least 0")
        most = self.rtt_ms / 2
        _check(
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
    ProxyConfig,
)


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse `SPECWIRE_*` variables that no process reads."""
    refuse_unknown_variables(ALL_CONFIGS, environ)
