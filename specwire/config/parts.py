"""Parts that the configs of services and of stacks have in common: a flag is said in one of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specwire.config.fields import (
    AUTO,
    SERVER_TLS,
    CertificateConfig,
    ServerConfig,
    at_least,
    check_address,
    check_amount,
    check_chat_template,
    check_plaintext,
    count_or_auto,
    file_option,
    one_of,
)
from specwire.config.flags import CheckedConfig, option
from specwire.config.models import DTYPES, RULES, VLLM, check_device
from specwire.config.speculative import (
    KSEQ,
    ModelDraftConfig,
    OwnDraftConfig,
    SpeculativeConfig,
    parse_speculative_config,
)
from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_NUM_OUTCOMES, Rule

_THREADS = "0: OMP_NUM_THREADS, or as many as other processes leave cores free"


@dataclass(frozen=True, kw_only=True)
class ListenConfig(CertificateConfig):
    """A listening address, and how callers authenticate there: TLS and tokens, from reloading files."""

    address: str = option("127.0.0.1:0", "HOST:PORT to listen on; port 0 picks a free one")
    tls_client_ca: str = file_option("PEM authorities; clients must have a certificate of theirs", "tls_cert")
    tokens: str = file_option("file of bearer tokens, as `specwire token` makes them; clients must send one")

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = self.tls_cert != "" or self.allow_plaintext
        check_plaintext("address", self.address, allowed=allowed, remedy=SERVER_TLS)


@dataclass(frozen=True, kw_only=True)
class ReportConfig(ServerConfig):
    """What is told of the work besides logs."""

    metrics_address: str = option(
        "", "HOST:PORT for Prometheus to scrape /metrics at; empty for none", check=check_address
    )
    trace_detail: bool = option(False, "record finer spans: the rule, and queue and passes of each request")
    metrics_names: str = option(
        "specwire",
        "names of the metrics: specwire's own, or vLLM's for those that it has too",
        check=one_of("specwire", VLLM),
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedConfig):
    """A model on its devices, beside what all services have."""

    dtype: str = option(
        "auto", "number format of the weights: auto, float32, bfloat16 or float16", check=one_of(*DTYPES)
    )
    device: str = option("cpu", "device the model runs on: cpu, cuda or cuda:N", check=check_device)
    num_threads: int = option(0, f"CPU threads for the model; {_THREADS}", check=at_least(0))
    tensor_parallel_size: int = option(
        1, "devices that share the model, placed by Ray; 1 needs no Ray", check=at_least(1)
    )
    ray_address: str = option("", "Ray cluster to place them in; empty starts one on this machine")
    num_kv_tokens: int = option(
        65536, "size of each KV cache, in tokens over all sequences", check=at_least(1)
    )
    prefix_sharing: bool = option(
        True,
        "share KV cache pages of equal prefixes between sequences; also --enable-prefix-caching",
        alias="enable_prefix_caching",
    )
    least_pass_ms: float = option(
        0.0,
        "least milliseconds of a forward pass, to emulate a larger model; the rest is slept; 0: none",
        check=check_amount,
    )


@dataclass(frozen=True, kw_only=True)
class TargetConfig(ModelConfig):
    """A target, once or several times, and the draft model that may run in its process."""

    replicas: int = option(
        1,
        "verify services to run, each with the whole model, on a card of its own with --device cuda; ports "
        "count up",
        check=at_least(1),
    )
    draft_dtype: str = option("auto", "number format of the draft model's weights", check=one_of(*DTYPES))
    lora_modules: str = option(
        "",
        "LoRA adapters of the target, in directories as peft writes them, which requests choose by name; "
        "several as several words, or with commas",
        metavar="NAME=DIR",
        is_list=True,
    )

    def device_of(self, index: int) -> str:
        """The device of a replica: on `cuda` one card each; Ray places those that span several."""
        spread = self.device == "cuda" and self.replicas > 1 and self.tensor_parallel_size == 1
        return f"cuda:{index}" if spread else self.device


@dataclass(frozen=True, kw_only=True)
class EngineConfig(CheckedConfig):
    """Sizes of an engine, which fit by default."""

    page_size: int = option(
        0,
        "tokens in a page of the KV cache; 0 for 16, and 256 on CUDA for its kernels",
        check=at_least(0),
        alias="block_size",
    )
    gpu_memory_utilization: float = option(
        0.0,
        "fraction of the device's memory that may be in use with the KV cache, instead of "
        "--num-kv-tokens; 0 for that",
    )
    max_model_len: int = option(
        0, "most tokens of a prompt and its output together; 0 for the model's own context", check=at_least(0)
    )
    max_num_tokens: int = option(
        2048,
        "most tokens in one forward pass",
        check=at_least(MAX_NUM_DRAFT_TOKENS + 1),
        alias="max_num_batched_tokens",
    )
    cuda_graphs: bool = option(True, "on CUDA, fuse layers, and record passes of usual sizes and replay them")


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(CheckedConfig):
    """How drafts are made and judged, for requests that do not say."""

    num_draft_tokens: str = option(
        AUTO,
        "draft tokens a round when a request does not say: a number, or auto for what pays",
        check=count_or_auto(MAX_NUM_DRAFT_TOKENS),
    )
    max_depth: str = option(
        AUTO,
        "longest path of token trees, 0 for chains: a number, or auto for what pays",
        check=count_or_auto(MAX_NUM_DRAFT_TOKENS),
    )
    num_outcomes: str = option(
        AUTO,
        "outcomes of a round that the draft prepares for: a number, or auto for what pays",
        check=count_or_auto(MAX_NUM_OUTCOMES),
    )
    verify_ahead: bool = option(
        True, "let verify go on by itself with prepared proposals, before the coordinator asks for it"
    )
    speculative_config: str = option(
        "",
        'JSON: {"method": "ngram", "prompt_lookup_max": 4}; empty drafts with the model alone',
        metavar="JSON",
        check=lambda _, text: parse_speculative_config(text),
    )
    suffix_shared: bool = option(
        False,
        "draft from earlier outputs of all clients, not only from those of the same token and cache_salt; "
        "drafts that are rejected show them",
    )
    rule: str = option(
        AUTO,
        "rule of requests that name none; auto takes gumbel for a given seed, else kseq where that is "
        "selected, else gumbel for a far draft or one in the target's process, else block",
        check=one_of(*RULES),
    )
    chat_template: str = option(
        "",
        "file with a chat template (Jinja), instead of the model's own; empty for that",
        metavar="FILE",
        check=check_chat_template,
    )

    def __post_init__(self) -> None:
        """Refuse what a flag and `speculative_config` both fix, or fix differently."""
        super().__post_init__()
        given = self.model_draft
        for name, fixed in (
            ("num_draft_tokens", given.num_speculative_tokens),
            ("max_depth", given.max_depth),
        ):
            is_open = fixed is None or getattr(self, name) == AUTO
            self._check(is_open, name, f"is {fixed} in --speculative-config")
        agrees = not given.selection or self.rule in (AUTO, Rule.KSEQ)
        self._check(agrees, "rule", f"contradicts selection {KSEQ} in --speculative-config")

    @cached_property
    def speculation(self) -> SpeculativeConfig | ModelDraftConfig | None:
        """What `speculative_config` says."""
        return parse_speculative_config(self.speculative_config)

    @property
    def text_draft(self) -> SpeculativeConfig | None:
        """Drafts that need no model; None for none."""
        return found if isinstance(found := self.speculation, SpeculativeConfig) else None

    @property
    def model_draft(self) -> ModelDraftConfig:
        """How the draft model drafts; as it does by default where it says nothing of it."""
        return found if isinstance(found := self.speculation, ModelDraftConfig) else ModelDraftConfig()

    @property
    def own_draft(self) -> OwnDraftConfig | None:
        """How the target drafts for itself; None if it does not."""
        return found if isinstance(found := self.speculation, OwnDraftConfig) else None
