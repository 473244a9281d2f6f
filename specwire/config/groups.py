"""Under which title, and in which order, the help of a command lists flags."""

from __future__ import annotations

_GROUPS = {
    "model": (
        *("target", "model", "dtype", "device", "tensor_parallel_size", "ray_address", "replicas"),
        *("num_threads", "tokenizer", "chat_template", "max_model_len", "seed", "batch_invariant"),
        *("cuda_graphs", "least_pass_ms", "load_timeout_s", "step_timeout_s", "start_timeout_s"),
    ),
    "speculation": (
        *("draft", "num_draft_tokens", "max_depth", "speculative_config", "rule", "verify_ahead"),
        *("num_outcomes", "max_outcomes", "suffix_shared", "support_mass", "max_support"),
        *("target_tokenizer", "inner", "heads", "layers", "mtp", "dflash", "eagle3"),
        *("draft_model", "draft_placement"),
        *("draft_dtype", "draft_device", "draft_num_threads", "draft_rtt_ms", "draft_timeout_ms"),
        *(
            "draft_learn",
            "draft_learn_share",
            "learn",
            "learn_share",
            "learn_rate",
            "learn_shared",
            "learn_out",
        ),
    ),
    "memory and batches": (
        *("num_kv_tokens", "kv_cache_memory", "gpu_memory_utilization", "page_size", "prefix_sharing"),
        *("max_num_tokens", "max_prefill_tokens", "max_sequences", "max_running", "max_waiting"),
    ),
    "server": (
        *("host", "port", "address", "http_address", "model_name", "listen", "to", "workers", "grace_s"),
        *("idle_timeout_s", "max_message_bytes", "max_body_bytes", "max_prompt_bytes", "lenient"),
        *("cors_origin", "allowed_hosts", "metrics_from", "tool_call_parser"),
    ),
    "connections": (
        *("server", "verify_address", "draft_address", "timeout_s", "connect_timeout_s"),
        *("failover_timeout_s", "patience_s", "rtt_ms", "jitter_ms", "bandwidth_mbps"),
    ),
    "security": (
        *("api_key", "tokens", "tls_cert", "tls_key", "tls_client_ca", "allow_plaintext", "tls", "tls_ca"),
        *("client_cert", "client_key", "server_name", "token", "token_file"),
        *("peer_ca", "peer_cert", "peer_key", "peer_server_name", "peer_token_file"),
    ),
    "logs and metrics": ("log_level", "log_format", "metrics_address", "metrics_names", "trace_detail"),
}
_TITLES = {name: title for title, names in _GROUPS.items() for name in names}
_PLACES = {name: place for place, name in enumerate(_TITLES)}
OTHER = "flags"


def title_of(name: str) -> str:
    """The title for a field of that name."""
    return _TITLES.get(name, OTHER)


def place_of(name: str) -> int:
    """The place of a field of that name among all flags; those without a title come last."""
    return _PLACES.get(name, len(_PLACES))
