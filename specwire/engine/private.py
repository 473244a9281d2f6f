"""What is used of torch beyond its public interface; `tests/tensors/test_private_apis.py` pins it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_mkldnn: Any = torch.ops.mkldnn
MKLDNN_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
_NO_POINTWISE: tuple[str, list[float], str] = ("none", [], "")


def can_pack_weights(dtype: torch.dtype) -> bool:
    """Whether this torch has the operators of oneDNN, and this processor instructions for the dtype."""
    has_kernels: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_kernels or not all(hasattr(_mkldnn, name) for name in MKLDNN_OPERATORS):
        return False
    is_supported = dtype == torch.bfloat16 and _mkldnn._is_mkldnn_bf16_supported()
    return bool(dtype == torch.float32 or is_supported)


def pack_weight(weight: Tensor, num_tokens: int) -> Tensor:
    """A weight [num_outputs, num_inputs] in the order in which oneDNN reads it, which depends on how many
    tokens a product is expected to have; for `packed_linear` alone."""
    return cast(Tensor, _mkldnn._reorder_linear_weight(weight, num_tokens))


def packed_linear(tokens: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` over a weight that `pack_weight` made."""
    return cast(Tensor, _mkldnn._linear_pointwise(tokens, packed, bias, *_NO_POINTWISE))


def end_compilers() -> None:
    """End the processes that torch's compiler has started, which would stay as long as this one."""
    from torch._inductor.async_compile import shutdown_compile_workers  # loads the compiler

    shutdown_compile_workers()
