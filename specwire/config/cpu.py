"""Number formats: what a processor computes in, and what weights are loaded in where none is given."""

from __future__ import annotations

from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_NEEDED = {
    "bfloat16": ({"avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"}),
    "float16": ({"avx512_fp16"}, {"avx_ne_convert"}, {"asimdhp"}),
}
"""Features of a processor, one set of which oneDNN's products of a format need: x86's, then ARM's."""


def default_dtype(stored: str, device: str) -> str:
    """What weights that are stored in a format are loaded in.

    On CUDA half precision. On a CPU as they are stored, but in float32 where it has no instructions for that:
    on one of AMD with AVX2 alone, torch's products with 4,096 x 1,024 take 1.2 and 1.0 ms in float32 and
    bfloat16 for one token, 11 and 18 for 17, 22 and 83 for 64; a target of 252 million parameters writes 6.7
    and 7.5 tokens a second alone, and 18.5 and 12.5 with a draft.
    """
    if device.startswith("cuda"):
        return stored if stored in _NEEDED else "bfloat16"
    return stored if is_native(stored) else "float32"


def is_native(dtype: str, cpu_info: Path = _CPU_INFO) -> bool:
    """Whether this machine's processor has instructions for it; true where the system does not say."""
    if dtype not in _NEEDED or not cpu_info.exists():
        return True
    features = {
        name
        for line in cpu_info.read_text().splitlines()
        if line.lower().startswith(("flags", "features"))
        for name in line.partition(":")[2].split()
    }
    return not features or any(needed <= features for needed in _NEEDED[dtype])
