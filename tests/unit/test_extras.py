"""A command whose extra is not installed says so before it starts anything."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from specwire.config import extras
from specwire.errors import ConfigError
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.support.imports import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
HIDDEN = """\
import runpy, sys
sys.modules[{module!r}] = None
sys.argv = {argv!r}
runpy.run_module({main!r}, run_name="__main__")
"""


@pytest.mark.parametrize("extra", extras.MODULES)
def test_an_extra_is_known_by_modules_of_its_packages(extra: str) -> None:
    extras.require("this test", extra)
    packages = {canonicalize_name(Requirement(line).name) for line in OPTIONAL[extra]}
    owners = metadata.packages_distributions()
    for module in extras.MODULES[extra]:
        name = module.partition(".")[0]
        assert packages & {canonicalize_name(owner) for owner in owners[name]}, module


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("main", "command", "module", "extra"),
    [
        ("specwire.cli", ["up"], "torch", "serve"),
        ("specwire.cli", ["http"], "starlette", "http"),
        ("specwire.cli", ["demo"], "torch", "serve"),
        ("specwire.cli", ["timeline", "--live"], "torch", "serve"),
        ("draft_service", [], "torch", "serve"),
        ("verify_service", [], "transformers", "serve"),
        ("coordinator", [], "grpc_reflection", "coordinator"),
    ],
)
def test_a_command_names_what_to_install(main: str, command: list[str], module: str, extra: str) -> None:
    code = HIDDEN.format(module=module, argv=["specwire", *command], main=main)
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    message = rf"needs pip install 'specwire\[{extra}\]' \({module} is missing\)"
    assert re.search(rf"specwire [-\w ]+ {message}\n", ended.stderr)


def test_a_package_without_its_parent_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"receiving spans needs .*\(opentelemetry.sdk is missing\)"):
        extras.require("receiving spans", "tracing")


def test_the_lowest_versions_run_the_generated_code() -> None:
    """Which refuses to be imported by a runtime that is older than what generated it."""
    generated = Path(generation_pb2.__file__).read_text()
    [numbers] = re.findall(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+)", generated)
    needed = {"grpcio": generation_pb2_grpc.GRPC_GENERATED_VERSION, "protobuf": ".".join(numbers)}
    bounds = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
    for name, version in needed.items():
        [bound] = bounds[name]
        assert Version(bound.version) >= Version(version), name
