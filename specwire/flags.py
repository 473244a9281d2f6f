"""Command line flags and `SPECWIRE_*` variables, both read off frozen config dataclasses.

A field `num_draft_tokens: int = option(5, "...")` becomes `--num-draft-tokens N` and
`SPECWIRE_NUM_DRAFT_TOKENS`. A flag beats its variable, and the variable beats the default.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from specwire.errors import ConfigError

ENV_PREFIX = "SPECWIRE_"
Config = TypeVar("Config")


def option(default: Any, doc: str) -> Any:
    """A config field with its default and the sentence that documents it."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def flag_name(name: str) -> str:
    """`num_draft_tokens` to `--num-draft-tokens`."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """`num_draft_tokens` to `SPECWIRE_NUM_DRAFT_TOKENS`."""
    return ENV_PREFIX + name.upper()


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """One flag a field; absent flags leave no trace, so that the variable or the default counts."""
    for field in dataclasses.fields(config):
        doc = f"{field.metadata['doc']} (default: {field.default!r}, or ${env_name(field.name)})"
        kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": doc.replace("%", "%%")}
        if isinstance(field.default, bool):
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs["type"] = _parser_of(field)
            kwargs["metavar"] = {int: "N", float: "X"}.get(type(field.default), "VALUE")
        parser.add_argument(flag_name(field.name), **kwargs)


def read_config(config: type[Config], args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """The config that flags, variables and defaults add up to.

    Raises:
        ConfigError: a variable that does not parse; the config's own checks name bad values.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if field.name in args:
            values[field.name] = getattr(args, field.name)
        elif env_name(field.name) in environ:
            values[field.name] = _parse_env(field, environ[env_name(field.name)])
    return config(**values)


def refuse_unknown_variables(configs: Iterable[type[Any]], environ: Mapping[str, str]) -> None:
    """A misspelt `SPECWIRE_*` variable must not be ignored.

    Raises:
        ConfigError: naming the first unknown variable.
    """
    known = {env_name(field.name) for config in configs for field in dataclasses.fields(config)}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"environment variable {name}={environ[name]!r} is not known")


def _parser_of(field: dataclasses.Field[Any]) -> Any:
    return type(field.default) if field.default is not None else str


def _parse_env(field: dataclasses.Field[Any], text: str) -> Any:
    if isinstance(field.default, bool):
        if text.lower() in ("1", "true", "yes"):
            return True
        if text.lower() in ("0", "false", "no"):
            return False
        raise ConfigError(f"environment variable {env_name(field.name)}={text!r} is neither true nor false")
    try:
        return _parser_of(field)(text)
    except ValueError:
        kind = _parser_of(field).__name__
        raise ConfigError(f"environment variable {env_name(field.name)}={text!r} is not {kind}") from None
