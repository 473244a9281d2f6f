"""Who may import whom, read off the syntax tree: nothing is imported to find out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.imports import GRPC, ROOT, SERVICES, imports, packages, reached, sources

ORDER = (
    ("clock", "errors", "parent", "v1", "embedded"),
    ("text",),
    ("core", "support"),
    ("completion", "proposals"),
    *(("rule",), ("config",), ("telemetry",), ("rpc",)),
    *(("engine",), ("client",), ("http",), ("cli",), ("vllm",), ("sglang",)),
)
"""The folders of `specwire/` and its modules beside them: each imports only from those before it."""

WITHIN = {
    "text": (("schema_unions", "unicode"), ("schema",), ("grammar", "tokenizer"), ("token_texts",)),
    "proposals": (
        ("tree", "history"),
        ("chains", "growth"),
        ("prepared", "pushes"),
        ("estimate",),
    ),
    "config": (("pairs",), ("cuda", "ports", "security"), ("",), ("preflight",)),
    "rpc": (("interrupts", "wire"), ("",)),
}
"""The order within some of these folders; "" is all that is not named."""

WITH_GRPC = {
    *(f"{service}/{name}.py" for service in SERVICES for name in ("__main__", "service", "servicer")),
    "coordinator/peers/handshake.py",
    "coordinator/peers/streams.py",
    "coordinator/totals.py",
    "specwire/cli/status.py",
    "specwire/client/endpoints.py",
    "specwire/client/streaming.py",
    *(f"specwire/rpc/{path.name}" for path in sorted((ROOT / "specwire/rpc").glob("*.py"))),
    "tools/timeline/receiver.py",
}
"""Who may know gRPC: everything else can be driven by fakes, without any network."""

PLUGINS = {ROOT / "specwire/vllm.py", ROOT / "specwire/sglang.py"}
"""What other engines load; these stand on the coordinator's peers."""

TORCH_IN_RULE = {"captured", "choices", "rows", "sampling", "transfer"}
FOLDERS = (*SERVICES, "specwire", "tools")
PRODUCT = [path for folder in FOLDERS for path in sources(folder)]
MAIN = ROOT / "specwire/cli/main.py"
"""The one file of the core that imports the tools: it finds their commands when it runs."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_specwire_and_never_each_other(folder: str) -> None:
    """Nor tests or benchmarks."""
    seen: set[str] = set()
    for path in sources(folder):
        found = packages(imports(path)) & {*FOLDERS, "tests", "benchmarks", "pytest"}
        others = {"tools"} if path == MAIN else {"coordinator"} if path in PLUGINS else set()
        assert found - {folder, "specwire"} == others, path
        seen |= found
    assert "specwire" in seen


def test_plugins_are_for_the_engines_that_load_them() -> None:
    for path in PRODUCT:
        found = imports(path)
        assert path.stem == "sglang" or "specwire.vllm" not in found, path
        assert "specwire.sglang" not in found, path


def test_folders_import_from_those_before_them() -> None:
    level = {name: number for number, names in enumerate(ORDER) for name in names}
    for path in sources("specwire"):
        own = path.relative_to(ROOT / "specwire").with_suffix("").parts[0]
        if own == "__init__":
            continue
        found = {name.split(".")[1] for name in imports(path) if name.startswith("specwire.")}
        found = {name for name in found if name in level} - {own}
        assert all(level[name] < level[own] for name in found), (path, found)


@pytest.mark.parametrize("folder", WITHIN)
def test_rooms_have_an_order_too(folder: str) -> None:
    level = {name: number for number, names in enumerate(WITHIN[folder]) for name in names}
    prefix = f"specwire.{folder}."
    for path in sources(f"specwire/{folder}"):
        own = path.relative_to(ROOT / "specwire" / folder).with_suffix("").parts[0]
        own = own if own in level else ""
        found = {name.removeprefix(prefix).split(".")[0] for name in imports(path) if name.startswith(prefix)}
        found = {name if name in level else "" for name in found} - {own}
        assert all(level[name] < level[own] for name in found), (path, found)


def test_specwire_is_seen_at_a_glance() -> None:
    there = [path for path in (ROOT / "specwire").iterdir() if path.name != "__pycache__"]
    assert sum(path.suffix == ".py" and path.stem != "__init__" for path in there) <= 8
    assert sum(path.is_dir() for path in there) <= 12


def test_every_folder_has_its_place() -> None:
    there = {
        path.stem
        for path in (ROOT / "specwire").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there - {"__init__"} == {name for names in ORDER for name in names}


def test_the_command_line_finds_the_tools_when_it_runs() -> None:
    assert "tools" not in packages(imports(MAIN, lazy=False))
    assert {name for name in imports(MAIN) if name.startswith("tools")} == {"tools", "tools.commands"}


def test_behaviour_knows_no_grpc() -> None:
    for path in PRODUCT:
        if str(path.relative_to(ROOT)) not in WITH_GRPC:
            found = imports(path)
            assert not packages(found) & GRPC, path
            assert not [module for module in found if module.endswith("_grpc")], path


def test_no_torch_in_the_coordinator() -> None:
    for path in sources("coordinator"):
        found = imports(path)
        assert not packages(found) & {"torch", "transformers"}, path
        assert not [
            name for name in found if name.startswith(("specwire.engine", "specwire.rule.sampling"))
        ], path


TRAINS = ("specwire/engine/", "tools/heads/", "tools/eagle3/", "tools/layers/", "tools/training.py")


def test_no_torch_outside_the_engine_the_samplers_and_what_trains() -> None:
    heavy = {"torch", "safetensors"}
    for path in (*sources("specwire"), *sources("tools")):
        relative = path.relative_to(ROOT)
        if str(relative).startswith(TRAINS):
            continue
        if relative.parent.name == "rule" and relative.stem in TORCH_IN_RULE:
            continue
        if path in PLUGINS:  # their engines have loaded it
            continue
        assert not packages(imports(path, lazy=relative.name != "random.py")) & heavy, path
        assert "transformers" not in packages(imports(path, lazy=False)), path


def test_the_command_line_loads_no_torch() -> None:
    for path in reached(ROOT / "specwire/cli/__main__.py", MAIN, ROOT / "tools/commands.py"):
        assert not packages(imports(path, lazy=False)) & {"torch", "safetensors", "transformers"}, path


def test_ray_is_imported_where_it_is_used_and_nowhere_else() -> None:
    for path in PRODUCT:
        found = imports(path)
        in_group = path.parent == ROOT / "specwire/engine/group"
        assert in_group or "ray" not in packages(found), path
        assert "ray" not in packages(imports(path, lazy=False)), path
        group = {name for name in found if name.startswith("specwire.engine.group")}
        starts_it = path in (ROOT / "specwire/engine/models.py", ROOT / "verify_service/replicas.py")
        assert in_group or not group or starts_it, path
    models = imports(ROOT / "specwire/engine/models.py", lazy=False)
    assert not [name for name in models if name.startswith("specwire.engine.group")], "size 1 needs no group"
    verify = imports(ROOT / "verify_service/__main__.py", lazy=False)
    assert "verify_service.replicas" not in verify, "nor does one replica"


def test_emulated_devices_need_no_transformers() -> None:
    """Which take seconds to import."""
    seen = reached(*(ROOT / service / "service.py" for service in SERVICES))
    for path in seen:
        assert "transformers" not in packages(imports(path, lazy=False)), path
    assert ROOT / "specwire/engine/loop.py" in seen
    assert ROOT / "specwire/engine/models.py" not in seen


def test_unit_tests_load_no_torch() -> None:
    """Which takes seconds to import; tests of tensors are in `tests/tensors`."""
    seen = reached(ROOT / "tests/conftest.py", *sources("tests/unit"))
    for path in seen:
        assert not packages(imports(path, lazy=False)) & {"torch", "safetensors"}, path
    assert ROOT / "coordinator/generation.py" in seen


def test_the_http_front_is_loaded_by_its_command_alone() -> None:
    for path in PRODUCT:
        if ROOT / "specwire/http" not in path.parents:
            assert not packages(imports(path)) & {"starlette", "uvicorn", "pydantic"}, path
            assert not [name for name in imports(path, lazy=False) if name.startswith("specwire.http")], path


def test_the_books_know_no_device() -> None:
    cache = ("cache/copies", "cache/free_pages", "cache/kv_cache", "cache/prefix")
    for name in ("batch", "jobs", *cache, "schedule"):
        assert "torch" not in packages(imports(ROOT / f"specwire/engine/{name}.py")), name


def test_the_pure_core_has_no_clock_and_no_generator_of_its_own() -> None:
    rule = ("rule/acceptance", "rule/kseq", "rule/sampling")
    for name in ("core", "errors", *rule, "proposals/tree", "proposals/chains"):
        found = packages(imports(ROOT / f"specwire/{name}.py"))
        assert not found & {"time", "random", "asyncio", "threading", "socket", "os"}, name


def test_the_finder_sees_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text("import a.b\nfrom c import d\ndef f():\n    import e\nclass G:\n    import h\n")
    assert imports(path) == {"a.b", "c", "c.d", "e", "h"}
    assert imports(path, lazy=False) == {"a.b", "c", "c.d", "h"}
