"""What files import, read off the syntax tree: nothing is imported to find out."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ("coordinator", "draft_service", "verify_service")
GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status"}


def imports(path: Path, *, lazy: bool = True) -> frozenset[str]:
    """Dotted names that a file imports; `from a import b` counts as both `a` and `a.b`.

    Args:
        lazy: also those inside functions.
    """
    return _imports(path)[lazy]


@functools.cache
def _imports(path: Path) -> list[frozenset[str]]:
    """Those outside of functions, and all."""
    tree = ast.parse(path.read_text())
    return [frozenset(name for node in nodes(tree, lazy) for name in names(node)) for lazy in (False, True)]


def reached(*paths: Path) -> set[Path]:
    """These files and all of this repository that is loaded with them."""
    seen, left = set(), set(paths)
    while left:
        path = left.pop()
        seen.add(path)
        for name in imports(path, lazy=False):
            parts = name.split(".")
            modules = {ROOT.joinpath(*parts).with_suffix(".py")}
            modules |= {ROOT.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts) + 1)}
            left |= {module for module in modules if module.exists()} - seen
    return seen


def nodes(tree: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.expr) or (inside and not lazy) or is_type_checking(child):
            continue
        yield child
        yield from nodes(child, lazy)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide where a name comes from"
        assert node.module is not None
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(found: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in found}


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "v1" not in path.parts]
