"""Packages beyond the client's: those of commands, which are extras of pyproject.toml, and of checkpoints."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from specwire.errors import ConfigError

MODULES = {
    "coordinator": ("transformers", "grpc_reflection"),
    "serve": ("torch", "transformers", "grpc_reflection"),
    "http": ("starlette", "uvicorn", "pydantic", "transformers"),
    "bench": ("matplotlib", "httpx2", "tqdm"),
    "search": ("bayes_opt",),
    "tracing": ("opentelemetry.sdk",),
}
"""Extra → modules by which it is known to be installed. Looking for them imports none of them."""
QUANTISERS = {
    "aqlm": ("accelerate", "aqlm"),
    "auto-round": ("auto_round",),
    "awq": ("accelerate", "gptqmodel"),
    "bitnet": ("accelerate",),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("accelerate", "kernels"),
    "fp8": ("accelerate",),
    "gptq": ("gptqmodel", "optimum"),
    "mxfp4": ("accelerate",),
    "mxfp8": ("accelerate",),
    "torchao": ("torchao",),
    "vptq": ("accelerate", "vptq"),
}
"""By method of `quantization_config`, as they are imported. Of others transformers says it when it loads."""
_WEIGHTS_ALONE = ("Float8WeightOnlyConfig", "Int8WeightOnlyConfig")
"""Types of torchao that quantise no activations, and whose weights can be cut."""
_PACKED = ("auto-round", "awq", "bitsandbytes", "gptq")
"""Methods whose layers hold weights packed in an order of their own, in buffers or as one row of bytes."""
_TO_PLACE = ("accelerate",)
"""What transformers needs to create weights on a device."""


def require(what: str, extra: str) -> None:
    """Refuse what cannot run here, before anything starts: ConfigError names the module that is missing.

    Args:
        what: what the user asked for, as the subject of the message: "specwire up".
        extra: a key of `MODULES`.
    """
    for module in MODULES[extra]:
        if not is_installed(module):
            raise ConfigError(f"{what} needs pip install 'specwire[{extra}]' ({module} is missing)")


def is_installed(module: str) -> bool:
    """Whether it could be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


def missing_for(wanted: Any, *, on_cuda: bool = False) -> str:
    """What is missing for a `quantization_config`; empty for nothing, and without one."""
    name = quantiser(wanted)
    needed = {*QUANTISERS.get(name, ()), *(_TO_PLACE if name and on_cuda else ())}
    missing = [each.replace("_", "-") for each in sorted(needed) if not is_installed(each)]
    if not missing:
        return ""
    return (
        f"its weights are quantised by {name}, which transformers cannot read here without "
        f"{' and '.join(missing)}; pip install {' '.join(missing)}, or give one that is not quantised"
    )


def unshared_reason(wanted: Any) -> str:
    """Why ranks cannot share weights with a `quantization_config`; empty if they can, or without one.

    Activations that are quantised by all inputs of a layer would be others where a rank has a part of them.
    """
    name = quantiser(wanted)
    if name == "torchao":
        # What it does with the layers that no name singles out.
        kinds = wanted.get("quant_type")
        default = kinds.get("default") if isinstance(kinds, dict) else None
        kind = str(default.get("_type") if isinstance(default, dict) else None)
        reason = "" if kind in _WEIGHTS_ALONE else f"{kind} is none of {', '.join(_WEIGHTS_ALONE)}"
    elif name == "compressed-tensors":
        reason = _uncut_tensors(wanted)
    elif name in _PACKED:
        reason = "its layers hold them packed, and transformers' tensor parallel plan does not cut those"
    else:
        reason = "" if name in ("", "fp8") else "compressed-tensors, fp8 and torchao can be"
    return reason and f"its weights are quantised by {name}, and cannot be spread over ranks: {reason}"


def _uncut_tensors(wanted: dict[str, Any]) -> str:
    """As `unshared_reason`, of compressed-tensors: weights are decompressed when they are read."""
    groups = list((wanted.get("config_groups") or {}).values())
    if len(groups) != 1 or not isinstance(groups[0], dict):
        return f"it has {len(groups)} groups of layers, and one is decompressed when it is read"
    if groups[0].get("input_activations") or groups[0].get("output_activations"):
        return "activations are quantised too, by all of a layer, of which a rank has a part"
    return "the KV cache is quantised too" if wanted.get("kv_cache_scheme") else ""


def quantiser(wanted: Any) -> str:
    """The method of a `quantization_config`; empty without one. Old ones of bitsandbytes name none."""
    if not isinstance(wanted, dict):
        return ""
    is_bitsandbytes = wanted.get("load_in_4bit") or wanted.get("load_in_8bit")
    return "bitsandbytes" if is_bitsandbytes else str(wanted.get("quant_method") or "")
