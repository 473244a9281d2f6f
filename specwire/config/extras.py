"""What commands need beyond the client: the extras of pyproject.toml."""

from __future__ import annotations

from importlib.util import find_spec

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


def require(what: str, extra: str) -> None:
    """Refuse what cannot run in this environment, before anything starts.

    Args:
        what: what the user asked for, as the subject of the message: "specwire up".
        extra: a key of `MODULES`.

    Raises:
        ConfigError: a module of the extra is not installed.
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
