"""Quantised weights are refused where a package is missing that transformers reads them with."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from specwire.config import extras
from specwire.config.preflight.models import Model, check
from specwire.errors import ConfigError


@pytest.mark.parametrize(
    ("wanted", "installed", "on_cuda", "missing"),
    [
        ({"quant_method": "fp8"}, "", False, "fp8, .* without accelerate; pip install accelerate, or"),
        ({"quant_method": "awq"}, "accelerate", False, "awq, .* pip install gptqmodel, or"),
        ({"load_in_4bit": True}, "", False, "bitsandbytes, .* pip install accelerate bitsandbytes, or"),
        ({"quant_method": "compressed-tensors"}, "", False, "pip install compressed-tensors, or"),
        ({"quant_method": "torchao"}, "torchao", True, "torchao, .* pip install accelerate, or"),
        ({"quant_method": "torchao"}, "torchao", False, ""),
        ({"quant_method": "of-tomorrow"}, "", False, ""),
        (None, "", True, ""),
    ],
)
def test_what_is_missing_is_named(
    wanted: Any, installed: str, on_cuda: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", installed.split().__contains__)
    device, config = "cuda" if on_cuda else "cpu", {"quantization_config": wanted}
    model = Model(name="draft", source="org/model", device=device, config=config)
    refused = pytest.raises(ConfigError, match=f"^--draft org/model: .*{missing}")
    with refused if missing else contextlib.nullcontext():
        check(model)
