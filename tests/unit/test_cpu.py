"""Which number formats a processor computes in."""

from __future__ import annotations

from pathlib import Path

import pytest

from specwire.config.cpu import default_dtype, is_native

AVX2 = "flags\t\t: fpu sse4_2 fma avx avx2"
AVX512 = f"processor\t: 0\n{AVX2} avx512f avx512bw avx512vl avx512dq"
ARM = "Features\t: fp asimd fphp asimdhp"


@pytest.mark.parametrize(
    ("info", "dtype", "wanted"),
    [
        (AVX2, "float32", True),
        (AVX2, "bfloat16", False),
        (AVX2, "float16", False),
        (f"{AVX2} avx_ne_convert", "float16", True),
        (AVX512, "bfloat16", True),
        (AVX512, "float16", False),
        (f"{AVX512} avx512_fp16", "float16", True),
        (ARM, "bfloat16", False),
        (ARM, "float16", True),
        (f"{ARM} bf16", "bfloat16", True),
        ("model name\t: unknown", "bfloat16", True),
    ],
)
def test_formats_need_instructions(info: str, dtype: str, wanted: bool, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{info}\n")
    assert is_native(dtype, path) is wanted
    assert is_native(dtype, tmp_path / "missing")


def test_a_format_without_instructions_is_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specwire.config.cpu.is_native", lambda dtype: dtype == "float32")
    assert default_dtype("bfloat16", "cpu") == default_dtype("float16", "cpu") == "float32"
    assert default_dtype("float32", "cpu") == "float32"
    assert default_dtype("float16", "cuda:1") == "float16"
    assert default_dtype("float32", "cuda") == "bfloat16"
