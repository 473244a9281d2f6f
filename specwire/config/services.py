"""Configuration of the services; that of their clients is in `client.py`, that of stacks in `stack.py`.

Flags and `SPECWIRE_*` variables are derived from these fields (`flags.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.config.fields import (
    ALLOW_PLAINTEXT_HELP,
    AUTO,
    DNS,
    GRACE_HELP,
    MAX_PROMPT_HELP,
    MAX_WORKERS,
    SERVER_TLS,
    TLS_CERT_HELP,
    TLS_KEY_HELP,
    WORKERS_HELP,
    at_least,
    between,
    chat_template_option,
    check,
    check_address,
    check_amount,
    check_duration,
    check_pair,
    check_plaintext,
    count_or_auto,
    file_option,
    log_format_option,
    log_level_option,
    one_of,
    split_address,
    split_addresses,
)
from specwire.config.flags import CheckedConfig, flag_name, option
from specwire.config.models import (
    DTYPES,
    EMBEDDED,
    EMULATED,
    LEARN_HELP,
    LEARN_SHARE,
    LEARN_SHARE_HELP,
    LEAST_PASS_HELP,
    MAX_DEPTH_HELP,
    NUM_DRAFT_TOKENS_HELP,
    NUM_OUTCOMES_HELP,
    RULE_HELP,
    RULES,
    SUFFIX_SHARED_HELP,
    THREADS_HELP,
    TRACE_DETAIL_HELP,
    VERIFY_AHEAD_HELP,
    check_device,
    check_group,
    check_inner,
    check_own,
    check_said_once,
    check_share,
    metrics_names_option,
    parse_max_depth,
    parse_num_draft_tokens,
    parse_num_outcomes,
    prefix_sharing_option,
    speculative_config_option,
)
from specwire.config.security.tls import TLS, Credentials
from specwire.config.speculative import (
    DFLASH,
    DRAFT_MODEL,
    INNER_METHODS,
    KSEQ,
    MTP,
    OWN_ARGUMENTS,
    Own,
    SpeculativeConfig,
    model_draft,
    named_own,
    own_draft,
    parse_speculative_config,
)
from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_NUM_OUTCOMES, MAX_SUPPORT, SUPPORT_MASS, Rule

TLS_CLIENT_CA_HELP = "PEM authorities; clients must have a certificate of theirs"
TOKENS_HELP = "file of bearer tokens, as `specwire token` makes them; clients must send one"
ADDRESSES_HELP = "HOST:PORT of each replica, with commas, or dns:///NAME:PORT for all addresses of a name"
IDLE_TIMEOUT_HELP = (
    "longest time that a client may take no token that waits for it, in seconds; then its stream ends, "
    "and can be resumed"
)
HEADS_HELP = "directory of draft heads of the model, as `specwire train-heads` makes them; empty for none"
LAYERS_HELP = (
    "blocks to draft without, such as a3,m3,m4 (attention and MLP of layer 3, MLP of layer 4), or a file "
    f"that `specwire search-layers` wrote; {AUTO} for that beside the model; empty not to draft"
)
MTP_HELP = "let the model's own layers for multi-token prediction draft for it"
DFLASH_HELP = "directory of a block drafter (DFlash) of the model; empty for none"
DRAFT_MODEL_HELP = (
    "directory or hub id of a draft model that runs in this process, on the target's device; empty for none"
)
TARGET_TOKENIZER_HELP = (
    "directory or hub id of the target's tokenizer, for a draft with another one; empty for one with the same"
)
INNER_HELP = (
    f"what guesses the draft's own tokens, so that it takes fewer passes: {', '.join(INNER_METHODS)}, or "
    "a smaller model with its tokenizer; empty for none"
)
LEARN_SHARED_HELP = (
    "learn from requests with a bearer token or a cache_salt too; drafts that are rejected show them"
)
DRAFT_TIMEOUT_HELP = (
    "longest wait for a proposal before a plain round, or 8 times what proposals cost; a draft silent for "
    "5 times as long is lost"
)
STEP_TIMEOUT_HELP = (
    "longest forward pass of several devices, or before anything is known of what passes cost, in seconds"
)
MAX_MODEL_LEN_HELP = "most tokens of a prompt and its output together; 0 for the model's own context"
GPU_MEMORY_HELP = (
    "fraction of the device's memory that may be in use with the KV cache, instead of "
    "--num-kv-tokens; 0 for that"
)
NO_SEED = -1
SEED_HELP = (
    "seed of the seeds of requests without one, in order of arrival, so that a run can be repeated; "
    f"{NO_SEED} draws them at random"
)
_PAGE_LEN = 16
_CUDA_PAGE_LEN = 256


@dataclass(frozen=True, kw_only=True)
class ListenConfig(CheckedConfig):
    """A listening address, and how callers authenticate there: TLS and tokens, from reloading files."""

    address: str = option("127.0.0.1:0", "HOST:PORT to listen on; port 0 picks a free one")
    tls_cert: str = file_option(TLS_CERT_HELP)
    tls_key: str = file_option(TLS_KEY_HELP)
    tls_client_ca: str = file_option(TLS_CLIENT_CA_HELP)
    tokens: str = file_option(TOKENS_HELP)
    allow_plaintext: bool = option(False, ALLOW_PLAINTEXT_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair("tls_cert", self.tls_cert, "tls_key", self.tls_key)
        encrypted = bool(self.tls_cert)
        ca = self.tls_client_ca
        check(encrypted or not ca, "tls_client_ca", ca, "is of use together with --tls-cert only")
        check_plaintext("address", self.address, allowed=encrypted or self.allow_plaintext, remedy=SERVER_TLS)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(ListenConfig):
    """What all three services share."""

    grace_s: float = option(10.0, GRACE_HELP, check=check_amount)
    max_message_bytes: int = option(8 << 20, "largest message accepted, in bytes", check=at_least(4096))
    log_level: str = log_level_option()
    log_format: str = log_format_option()
    metrics_address: str = option(
        "", "HOST:PORT for Prometheus to scrape /metrics at; empty for none", check=check_address
    )
    trace_detail: bool = option(False, TRACE_DETAIL_HELP)
    metrics_names: str = metrics_names_option()

    @property
    def capacity(self) -> tuple[int, int]:
        """Most streams that are served at a time, and most that wait; more are refused."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelServiceConfig(ServiceConfig):
    """What draft and verify service share: model and engine."""

    model: str = option(
        EMBEDDED, "directory or hub id of a transformers causal language model or encoder-decoder"
    )
    dtype: str = option(
        "auto", "number format of the weights: auto, float32, bfloat16 or float16", check=one_of(*DTYPES)
    )
    device: str = option("cpu", "device the model runs on: cpu, cuda or cuda:N", check=check_device)
    num_threads: int = option(0, f"CPU threads for the model; {THREADS_HELP}", check=at_least(0))
    tensor_parallel_size: int = option(1, "devices that share the model, placed by Ray; 1 needs no Ray")
    ray_address: str = option("", "Ray cluster to place them in; empty starts one on this machine")
    load_timeout_s: float = option(
        1800.0, "longest wait for several devices to load the model, in seconds", check=check_duration
    )
    step_timeout_s: float = option(60.0, STEP_TIMEOUT_HELP, check=check_duration)
    num_kv_tokens: int = option(65536, "size of the KV cache, in tokens over all sequences")
    kv_cache_memory: float = option(
        0.0, "fraction of the device's free memory for the KV cache, instead of --num-kv-tokens; 0 for none"
    )
    page_size: int = option(
        0,
        "tokens in a page of the KV cache; 0 for 16, and 256 on CUDA for its kernels",
        check=at_least(0),
        alias="block_size",
    )
    gpu_memory_utilization: float = option(0.0, GPU_MEMORY_HELP)
    prefix_sharing: bool = prefix_sharing_option()
    max_model_len: int = option(0, MAX_MODEL_LEN_HELP, check=at_least(0))
    max_num_tokens: int = option(
        2048,
        "most tokens in one forward pass",
        check=at_least(MAX_NUM_DRAFT_TOKENS + 1),
        alias="max_num_batched_tokens",
    )
    max_prefill_tokens: int = option(
        256, "most tokens of prompts in a pass that running streams wait for", check=at_least(1)
    )
    cuda_graphs: bool = option(True, "on CUDA, record passes of usual sizes and replay them")
    batch_invariant: bool = option(False, "compute a token bitwise the same in any batch")
    max_sequences: int = option(1024, "most open streams; others are told when to retry", check=at_least(1))
    least_pass_ms: float = option(0.0, LEAST_PASS_HELP, check=check_amount)

    def __post_init__(self) -> None:
        super().__post_init__()
        source, _ = named_own(self.model)
        check(not source, "model", self.model, f"is no model: see the verify service's flag --{source}")
        check_group(self.tensor_parallel_size, self.ray_address, self.model, self.device)
        num_kv_tokens = self.num_kv_tokens
        check(num_kv_tokens >= self.page_len, "num_kv_tokens", num_kv_tokens, "is less than a page")
        for name in ("kv_cache_memory", "gpu_memory_utilization"):
            fraction = getattr(self, name)
            check(0 <= fraction < 1, name, fraction, "must lie in [0, 1)")
        one = not (self.kv_cache_memory and self.gpu_memory_utilization)
        value = self.gpu_memory_utilization
        check(one, "gpu_memory_utilization", value, "does not go together with --kv-cache-memory")

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
        """Pages for `num_kv_tokens` tokens."""
        return self.num_kv_tokens // self.page_len

    @property
    def fills_memory(self) -> bool:
        """Whether the KV cache takes what the device has left, instead of `num_kv_tokens`."""
        return bool(self.kv_cache_memory or self.gpu_memory_utilization)

    @property
    def shows_states(self) -> bool:
        """Whether hidden states are wanted beside logits."""
        return False

    @property
    def own(self) -> Own:
        """What a target drafts with by itself."""
        return Own()


@dataclass(frozen=True, kw_only=True)
class DraftConfig(ModelServiceConfig):
    """The draft service."""

    support_mass: float = option(
        SUPPORT_MASS, "probability mass that a sent draft distribution keeps, in (0, 1]"
    )
    max_support: int = option(
        MAX_SUPPORT,
        "most tokens in a sent draft distribution; a smaller one is sent whole",
        check=at_least(1),
    )
    max_outcomes: int = option(32, "most outcomes of a stream's round to work ahead on; 0 for none")
    target_tokenizer: str = option("", TARGET_TOKENIZER_HELP)
    inner: str = option("", INNER_HELP)
    learn: bool = option(False, LEARN_HELP)
    learn_share: float = option(LEARN_SHARE, LEARN_SHARE_HELP)
    learn_rate: float = option(3e-4, "learning rate of --learn", check=check_duration)
    learn_shared: bool = option(False, LEARN_SHARED_HELP)
    learn_out: str = option("", "directory that --learn writes the draft to at the end; empty for none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner:
            check_inner("inner", self.inner, self.model, self.tensor_parallel_size)
            problem = "does not guess for a draft with another vocabulary (--target-tokenizer)"
            check(not self.target_tokenizer, "inner", self.inner, problem)
        check(0 < self.support_mass <= 1, "support_mass", self.support_mass, "must lie in (0, 1]")
        alone = not self.target_tokenizer or self.tensor_parallel_size == 1
        check(alone, "target_tokenizer", self.target_tokenizer, "is served on one device only")
        most = MAX_NUM_OUTCOMES
        check(0 <= self.max_outcomes <= most, "max_outcomes", self.max_outcomes, f"must lie in [0, {most}]")
        check_share("learn_share", self.learn_share)
        out = self.learn_out
        check(self.learn or not out, "learn_out", out, "is of use together with --learn only")
        check(not out or Path(out) != Path(self.model), "learn_out", out, "is --model itself")
        if self.learn:
            self._check_learn()

    def _check_learn(self) -> None:
        """Refuse what does not go together with weights that change."""
        check(not self.model.startswith(EMULATED), "learn", True, f"{self.model} has no weights")
        for name, other, usual in (
            ("tensor_parallel_size", self.tensor_parallel_size, 1),
            ("batch_invariant", self.batch_invariant, False),
            ("target_tokenizer", self.target_tokenizer, ""),
            ("inner", self.inner, ""),
            ("least_pass_ms", self.least_pass_ms, 0.0),
        ):
            check(other == usual, name, other, "does not go together with --learn")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(ModelServiceConfig):
    """The verify service, or several of them."""

    replicas: int = option(
        1,
        "verify services to run, each with the whole model, on ports that count up from --address's",
        check=at_least(1),
    )
    heads: str = option("", HEADS_HELP)
    layers: str = option("", LAYERS_HELP)
    mtp: bool = option(False, MTP_HELP)
    dflash: str = option("", DFLASH_HELP)
    draft_model: str = option("", DRAFT_MODEL_HELP)
    draft_dtype: str = option("auto", "number format of --draft-model's weights", check=one_of(*DTYPES))

    @property
    def shows_states(self) -> bool:
        """See `ModelServiceConfig`."""
        return self.heads != ""

    @property
    def own(self) -> Own:
        """See `ModelServiceConfig`."""
        return next(iter(self._owns), Own())

    @property
    def _owns(self) -> list[Own]:
        """All that flags name; one at most where they are valid."""
        given = {source: getattr(self, source) for source in (*OWN_ARGUMENTS, DRAFT_MODEL)}
        return [Own(source, "" if value is True else value) for source, value in given.items() if value]

    def __post_init__(self) -> None:
        super().__post_init__()
        for own in self._owns:
            name, value = own.source, getattr(self, own.source)
            check(own == self.own, name, value, f"does not go together with {flag_name(self.own.source)}")
            check_own(name, value, own, self.model, self.tensor_parallel_size)
            fits = own.source not in (MTP, DFLASH) or not self.batch_invariant
            check(fits, name, value, "does not go together with --batch-invariant")
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
    num_draft_tokens: str = option(AUTO, NUM_DRAFT_TOKENS_HELP, check=count_or_auto(MAX_NUM_DRAFT_TOKENS))
    max_depth: str = option(AUTO, MAX_DEPTH_HELP, check=count_or_auto(MAX_NUM_DRAFT_TOKENS))
    num_outcomes: str = option(AUTO, NUM_OUTCOMES_HELP, check=count_or_auto(MAX_NUM_OUTCOMES))
    verify_ahead: bool = option(True, VERIFY_AHEAD_HELP)
    speculative_config: str = speculative_config_option()
    suffix_shared: bool = option(False, SUFFIX_SHARED_HELP)
    rule: str = option(AUTO, RULE_HELP, check=one_of(*RULES))
    seed: int = option(NO_SEED, SEED_HELP, check=at_least(NO_SEED))
    draft_timeout_ms: float = option(1000.0, DRAFT_TIMEOUT_HELP, check=check_duration)
    workers: int = option(1, WORKERS_HELP, check=between(1, MAX_WORKERS))
    max_running: int = option(256, "most generations at a time; others wait", alias="max_num_seqs")
    max_waiting: int = option(1024, "most generations that wait; others are told when to retry")
    idle_timeout_s: float = option(60.0, IDLE_TIMEOUT_HELP, check=check_duration)
    max_prompt_bytes: int = option(1 << 20, MAX_PROMPT_HELP, check=at_least(1))
    connect_timeout_s: float = option(
        60.0,
        "longest wait for a verify service at start, in seconds; one that loads its model is waited for",
        check=check_duration,
    )
    failover_timeout_s: float = option(
        5.0, "longest wait of a running generation for a verify service, in seconds", check=check_duration
    )
    tokenizer: str = option("", "directory or hub id of the tokenizer; empty asks the verify service")
    chat_template: str = chat_template_option()
    peer_ca: str = file_option(
        "PEM certificates of the authorities that draft and verify are verified against; empty for plaintext"
    )
    peer_cert: str = file_option("PEM certificate of the coordinator, for mutual TLS with draft and verify")
    peer_key: str = file_option("PEM private key of --peer-cert")
    peer_server_name: str = option("", "name in the certificates of draft and verify; empty for their hosts")
    peer_token_file: str = file_option("file with the bearer token for draft and verify")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_said_once(
            self.speculative_config,
            self.rule,
            num_draft_tokens=self.num_draft_tokens,
            max_depth=self.max_depth,
        )
        given = own_draft(self.speculative_config)
        model, flag = (given.model, given.source) if given else ("", "")
        check(not model, "speculative_config", f"model={model!r}", f"is the verify service's flag --{flag}")
        alone = self.seed == NO_SEED or self.workers == 1
        check(alone, "seed", self.seed, "does not go together with several --workers, whose order is open")
        self._check_peers()

    @property
    def capacity(self) -> tuple[int, int]:
        """See `ServiceConfig`."""
        return self.max_running, self.max_waiting

    def _check_peers(self) -> None:
        check_pair("peer_cert", self.peer_cert, "peer_key", self.peer_key)
        for name in ("peer_cert", "peer_server_name"):
            value = getattr(self, name)
            check(bool(self.peer_ca) or not value, name, value, "is of use together with --peer-ca only")
        allowed = bool(self.peer_ca) or self.allow_plaintext
        for name in ("verify_address", "draft_address"):
            addresses = getattr(self, name)
            for entry in split_addresses(name, addresses) if addresses or name == "verify_address" else ():
                check_plaintext(name, entry.removeprefix(DNS), allowed=allowed, remedy="give --peer-ca")

    @property
    def peer_credentials(self) -> Credentials:
        """Credentials for draft and verify, and what they are verified against."""
        tls = TLS(ca=self.peer_ca, cert=self.peer_cert, key=self.peer_key, server_name=self.peer_server_name)
        return Credentials(
            tls=tls if self.peer_ca else None,
            token_file=self.peer_token_file,
            allow_plaintext=self.allow_plaintext,
        )

    @property
    def fixed_draft_tokens(self) -> int | None:
        """Draft tokens a round of requests that name no number; None chooses it in each round."""
        if self.num_draft_tokens == AUTO:
            return model_draft(self.speculative_config).num_speculative_tokens
        return parse_num_draft_tokens(self.num_draft_tokens)

    @property
    def fixed_max_depth(self) -> int | None:
        """Longest path of a tree for requests that leave it open, 0 for chains; None finds out what pays."""
        if self.max_depth == AUTO:
            return model_draft(self.speculative_config).max_depth
        return parse_max_depth(self.max_depth)

    @property
    def use_heterogeneous_vocab(self) -> bool:
        """Whether to use a draft whose tokenizer is not the target's."""
        return model_draft(self.speculative_config).use_heterogeneous_vocab

    @property
    def selects_kseq(self) -> bool:
        """Whether sampled requests that name no rule have several chains in a round."""
        return model_draft(self.speculative_config).selection == KSEQ

    @property
    def num_chains(self) -> int:
        """Of a round under `Rule.KSEQ`."""
        return model_draft(self.speculative_config).num_chains

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Drafts that need no model; None for none."""
        found = parse_speculative_config(self.speculative_config)
        return found if isinstance(found, SpeculativeConfig) else None

    @property
    def own_source(self) -> str:
        """What the target drafts with by itself for requests that do not say; empty if it does not."""
        given = own_draft(self.speculative_config)
        return given.source if given else ""

    @property
    def fixed_outcomes(self) -> int | None:
        """Outcomes to prepare for; None chooses by measured benefit."""
        return parse_num_outcomes(self.num_outcomes)

    @property
    def fixed_rule(self) -> Rule | None:
        """Rule of requests that name none; None chooses it for each request."""
        return None if self.rule == AUTO else Rule(self.rule)


def _at(port: int) -> Any:
    """The field `address` of a command, where the flags of its clients expect it."""
    return option(f"127.0.0.1:{port}", "HOST:PORT to listen on; port 0 picks a free one")


@dataclass(frozen=True, kw_only=True)
class CoordinatorCommand(CoordinatorConfig):
    """`specwire coordinator`."""

    address: str = _at(7070)


@dataclass(frozen=True, kw_only=True)
class DraftCommand(DraftConfig):
    """`specwire draft`."""

    address: str = _at(7071)


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(VerifyConfig):
    """`specwire verify`."""

    address: str = _at(7072)
