"""Command line flags and `SPECWIRE_*` variables, both read off frozen config dataclasses.

A field `num_draft_tokens: int = option(4, "...")` becomes `--num-draft-tokens N` and
`SPECWIRE_NUM_DRAFT_TOKENS`. A flag beats its variable, and the variable beats the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from specwire.errors import ConfigError

ENV_PREFIX = "SPECWIRE_"
_OF_A_SERVICE = re.compile(
    ENV_PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_URL = re.compile("(tcp|udp|sctp)://")
_NEAR = 0.8
"""Likeness by difflib: `embeded` is 0.93 of `embedded`, `embed` 0.77, `gpt2` 0."""
Config = TypeVar("Config")
Check = Callable[[str, Any], object]
"""Raises ConfigError unless a field, given by name and value, is valid."""


def option(default: Any, doc: str, *, metavar: str = "", check: Check | None = None) -> Any:
    """A config field with its default, the sentence that documents it, and the check of its value."""
    return dataclasses.field(default=default, metadata={"doc": doc, "metavar": metavar, "check": check})


def secret(doc: str) -> Any:
    """A text that is set by its variable alone: every user of the machine can read a command line."""
    return dataclasses.field(default="", repr=False, metadata={"doc": doc, "secret": True})


class CheckedConfig:
    """Base of the configs: checks each field by its own `check`. Subclasses check what involves several."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (check := field.metadata.get("check")) is not None:
                check(field.name, getattr(self, field.name))


def flag_name(name: str) -> str:
    """`num_draft_tokens` to `--num-draft-tokens`."""
    return "--" + name.replace("_", "-")


def flag_words(name: str, value: object) -> tuple[str, ...]:
    """The command line arguments that set a field: `--num-draft-tokens 5`, `--no-prefix-sharing`."""
    if isinstance(value, bool):
        return (flag_name(name if value else f"no_{name}"),)
    return flag_name(name), str(value)


def env_name(name: str) -> str:
    """`num_draft_tokens` to `SPECWIRE_NUM_DRAFT_TOKENS`."""
    return ENV_PREFIX + name.upper()


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, config: type[Any]) -> None:
    """Add one flag for each field; a flag that is not given is absent from the namespace."""
    for field in dataclasses.fields(config):
        if "secret" in field.metadata:
            continue
        kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
        if isinstance(field.default, bool):
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs["type"] = type(field.default)
            kwargs["metavar"] = _metavar(field)
        parser.add_argument(flag_name(field.name), **kwargs)


def _help(field: dataclasses.Field[Any]) -> str:
    default = "" if field.default == "" else f"default {field.default}; "
    return f"{field.metadata['doc']} ({default}{env_name(field.name)})".replace("%", "%%")


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """`; did you mean X?` with the nearest of these, or nothing if none is near.

    >>> did_you_mean("embeded", ["embedded"])
    '; did you mean embedded?'
    """
    near = difflib.get_close_matches(value, list(known), n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def _metavar(field: dataclasses.Field[Any]) -> str:
    """The placeholder of the value in the help, by its type or by how the name ends."""
    if field.metadata["metavar"]:
        return str(field.metadata["metavar"])
    if not isinstance(field.default, str):
        return {int: "N", float: "X"}[type(field.default)]
    endings = {
        "address": "HOST:PORT",
        "server": "HOST:PORT",
        "listen": "HOST:PORT",
        "to": "HOST:PORT",
        "dtype": "DTYPE",
        "device": "DEVICE",
        "tokens": "N|auto",
        "outcomes": "N|auto",
    }
    endings |= dict.fromkeys(("model", "target", "draft", "tokenizer"), "DIR_OR_ID")
    return endings.get(field.name.rpartition("_")[2], "NAME")


def read_config(config: type[Config], args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """The config from flags, variables and defaults.

    Raises:
        ConfigError: naming the flag or the variable, and its value.
    """
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    flagged = {field.name: getattr(args, field.name) for field in fields if field.name in args}
    from_environ = {
        field.name: _parse_env(field, environ[name])
        for field in fields
        if (name := env_name(field.name)) in environ
        and field.name not in flagged
        and not _is_of_kubernetes(name, environ[name])
    }
    try:
        return config(**flagged, **from_environ)
    except ConfigError as error:
        raise _named_by_source(error, from_environ) from None


def _named_by_source(error: ConfigError, from_environ: Iterable[str]) -> ConfigError:
    """A config's own checks name flags; a value that a variable set is reported under the variable."""
    flag, _, rest = str(error).partition(" ")
    for name in from_environ:
        if flag == flag_name(name):
            return ConfigError(f"environment variable {env_name(name)}={rest}")
    return error


def known_variables(configs: Iterable[type[Any]]) -> set[str]:
    """The variables that these configs are read from."""
    return {env_name(field.name) for config in configs for field in dataclasses.fields(config)}


def unknown_variables(configs: Iterable[type[Any]], environ: Mapping[str, str]) -> list[str]:
    """`SPECWIRE_*` variables that none of these configs reads, sorted, but for those that Kubernetes sets."""
    known = known_variables(configs)
    ours = (name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
    return sorted(name for name in ours if not _is_of_kubernetes(name, environ[name]))


def _is_of_kubernetes(name: str, value: str) -> bool:
    """Whether it describes a Service called `specwire` or `specwire-...`, beside which the process runs:
    SPECWIRE_SERVICE_HOST, SPECWIRE_PORT=tcp://10.0.0.1:7070, SPECWIRE_PORT_7070_TCP_ADDR."""
    return bool(_OF_A_SERVICE.fullmatch(name)) or (name.endswith("_PORT") and bool(_URL.match(value)))


def _parse_env(field: dataclasses.Field[Any], text: str) -> Any:
    name = env_name(field.name)
    kind: Any = type(field.default)
    if kind is bool:
        if text.lower() in ("1", "true", "yes"):
            return True
        if text.lower() in ("0", "false", "no"):
            return False
        raise ConfigError(f"environment variable {name}={text!r} is neither true nor false")
    try:
        return kind(text)
    except ValueError:
        a_number = {int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"environment variable {name}={text!r} is not {a_number}") from None
