"""`specwire serve`: its flags, what it says of the draft, and vLLM's flags that mean nothing here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from specwire.config.models import NO_DRAFT
from specwire.config.parser import add_command
from specwire.config.serve import ServeConfig
from specwire.errors import ConfigError

_DESCRIPTION = """\
Serve a model over OpenAI's API and gRPC: faster by drafts, with the output of the model alone.
Flags that vLLM has too have its names.
"""
_EPILOG = """\
examples:
  specwire serve embedded                                  the small built-in model, with its draft
  specwire serve Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B     a model and a smaller one of its family
  specwire serve DIR --draft none                          the model alone
  specwire serve --config serve.yaml                       flags from a file, as model: DIR

Beyond this machine: --host 0.0.0.0 --allow-plaintext behind a proxy with TLS, and --api-key.
"""
_NO_TLS = "put a proxy with TLS in front, or start specwire up --tls-cert and specwire http --tls-cert"
_POSITIONAL = "give it without a flag: specwire serve MODEL"
_REPLACED = {
    "target": _POSITIONAL,
    "model": _POSITIONAL,
    "speculative_model": "give --draft",
    "num_speculative_tokens": "give --num-draft-tokens",
    "data_parallel_size": "give --replicas",
    "pipeline_parallel_size": "give --tensor-parallel-size",
    "quantization": "it is read from the checkpoint's config.json",
    "trust_remote_code": "code in a model directory is never run",
    "enforce_eager": "give --no-cuda-graphs",
    "kv_cache_dtype": "the cache has the dtype of the weights (--dtype)",
    "kv_cache_memory_bytes": "give --num-kv-tokens",
    "swap_space": "sequences that do not fit are computed again",
    "cpu_offload_gb": "weights stay on one device, or on several by --tensor-parallel-size",
    "enable_lora": "give --lora-modules",
    "max_loras": "a pass may have all adapters of --lora-modules",
    "max_lora_rank": "adapters of --lora-modules have the ranks in their files",
    "enable_chunked_prefill": "prompts are always computed in pieces; see --max-num-batched-tokens",
    "uvicorn_log_level": "give --log-level",
    "disable_log_requests": "requests are logged at --log-level info only",
    "disable_log_stats": "figures are served as metrics only, see --metrics-address",
    "allowed_origins": "give --cors-origin",
    "ssl_keyfile": _NO_TLS,
    "ssl_certfile": _NO_TLS,
    "download_dir": "set HF_HOME",
    "hf_token": "set HF_TOKEN",
    "revision": "download it with hf download --revision, and give the directory",
}
"""Flags of vLLM that are not ours, and one of `specwire up`: what to do instead."""


def add(commands: Any, run: Callable[[ServeConfig, argparse.Namespace], int]) -> None:
    serve = add_command(
        commands,
        "serve",
        "serve a model over OpenAI's API and gRPC: one command, vLLM's names",
        ServeConfig,
        run,
        has_file=True,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="specwire serve MODEL [--draft DRAFT] [flags]",
    )
    for name in _REPLACED:
        flag = "--" + name.replace("_", "-")
        hidden: Any = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        serve.add_argument(flag, dest=name, nargs="?", action=_Refuse, **hidden)


class _Refuse(argparse.Action):
    """Names what to use instead of a flag."""

    def __call__(self, _parser: Any, _space: Any, _value: Any, option: str | None = None) -> NoReturn:
        whose = "specwire up's" if self.dest == "target" else "vLLM's"
        raise ConfigError(f"{option}: is {whose}, not ours: {_REPLACED[self.dest]}")


def about_draft(config: ServeConfig) -> str:
    """What drafts, and whether that was said: a line for the start."""
    if config.draft == NO_DRAFT and not config.coordinator_speculation:
        return "draft none: the target alone, served plainly"
    source = config.draft if config.draft != NO_DRAFT else f"by {config.speculative_config}"
    why = "" if config.names_draft else ", the default; --draft none serves the target alone"
    return f"draft {source}{why}"
