"""Whether the packages are installed with which transformers reads quantised weights."""

from __future__ import annotations

from typing import Any

from specwire.config.extras import is_installed
from specwire.config.preflight.models import Files
from specwire.errors import ConfigError

PACKAGES = {
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
_TO_PLACE = ("accelerate",)
"""What transformers needs to create weights on a device."""


def check(files: Files) -> None:
    """Refuse quantised weights that transformers could not read.

    Raises:
        ConfigError: names the flag, the model, the method and what to install.
    """
    if found := problem(files.config.get("quantization_config"), on_cuda=files.model.on_cuda):
        raise ConfigError(f"{files.model.given}: {found}")


def problem(wanted: Any, *, on_cuda: bool = False) -> str:
    """What is missing for a `quantization_config`; empty for nothing, and without one."""
    name = method(wanted)
    needed = {*PACKAGES.get(name, ()), *(_TO_PLACE if name and on_cuda else ())}
    missing = [each.replace("_", "-") for each in sorted(needed) if not is_installed(each)]
    if not missing:
        return ""
    return (
        f"its weights are quantised by {name}, which transformers cannot read here without "
        f"{' and '.join(missing)}; pip install {' '.join(missing)}, or give one that is not quantised"
    )


def method(wanted: Any) -> str:
    """The method of a `quantization_config`; empty without one. Old ones of bitsandbytes name none."""
    if not isinstance(wanted, dict):
        return ""
    is_bitsandbytes = wanted.get("load_in_4bit") or wanted.get("load_in_8bit")
    return "bitsandbytes" if is_bitsandbytes else str(wanted.get("quant_method") or "")
