"""Flags, `SPECWIRE_*` variables and YAML files of flags, all read off frozen config dataclasses.

A field `num_draft_tokens: int = option(4, "...")` becomes `--num-draft-tokens N` and
`SPECWIRE_NUM_DRAFT_TOKENS`. A flag beats its variable, the variable the file of `--config`, and
that the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from specwire.config.pairs import without_repeats
from specwire.errors import ConfigError, ModelLoadError, SpecwireError

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


def option(
    default: Any,
    doc: str,
    *,
    metavar: str = "",
    check: Check | None = None,
    alias: str = "",
    needs: Sequence[str] = (),
    implied_by: Sequence[str] = (),
    is_positional: bool = False,
    is_list: bool = False,
) -> Any:
    """A config field with its default, the sentence that documents it, and the check of its value.

    Args:
        alias: a second name, as other servers have it.
        needs: other fields, without which it is of no use.
        implied_by: other fields, together with which it cannot be switched off.
        is_positional: given without a flag.
        is_list: whether the flag takes several words, which are joined by commas.
    """
    metadata: dict[str, Any] = {"doc": doc, "metavar": metavar, "check": check, "alias": alias}
    metadata |= {"needs": needs, "implied_by": implied_by, "positional": is_positional, "list": is_list}
    return dataclasses.field(default=default, metadata=metadata)


def same(config: type[Any], name: str, default: Any = None, **changed: str) -> Any:
    """The field of another config, with another default, `doc` or `alias` if these are given."""
    [field] = [field for field in dataclasses.fields(config) if field.name == name]
    default = field.default if default is None else default
    return dataclasses.field(default=default, metadata={**field.metadata, **changed})


def secret(doc: str, *, has_flag: bool = False) -> Any:
    """A text that is never shown. Every user of the machine can read a command line, so most have no flag."""
    return dataclasses.field(default="", repr=False, metadata={"doc": doc, "secret": True, "flag": has_flag})


class CheckedConfig:
    """Base of the configs: checks each field by its own `check` and `needs`. Subclasses check what else
    involves several."""

    def _check(self, ok: bool, name: str, problem: str) -> None:
        if not ok:
            raise ConfigError(f"{flag_name(name)} {getattr(self, name)}: {problem}")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if (check := field.metadata.get("check")) is not None:
                check(field.name, value)
            needs = field.metadata.get("needs", ()) if value else ()
            for other in needs:
                problem = f"is of use together with {flag_name(other)} only"
                self._check(bool(getattr(self, other)), field.name, problem)


def flag_name(name: str) -> str:
    """`num_draft_tokens` to `--num-draft-tokens`."""
    return "--" + name.replace("_", "-")


def flag_words(**values: object) -> list[str]:
    """The command line arguments that set fields: `--num-draft-tokens 5`, `--no-prefix-sharing`."""
    words: list[str] = []
    for name, value in values.items():
        is_switch = isinstance(value, bool)
        words += [flag_name(name if value else f"no_{name}")] if is_switch else [flag_name(name), str(value)]
    return words


def config_words(config: Any, aliases: Mapping[str, str] | None = None) -> list[str]:
    """The command line arguments that set all fields of a config, under their aliases there."""
    names = [field.name for field in settings_of(type(config))]
    return flag_words(**{(aliases or {}).get(name, name): getattr(config, name) for name in names})


def env_name(name: str) -> str:
    """`num_draft_tokens` to `SPECWIRE_NUM_DRAFT_TOKENS`."""
    return ENV_PREFIX + name.upper()


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """`; did you mean X?` with the nearest of these, or nothing if none is near.

    >>> did_you_mean("embeded", ["embedded"])
    '; did you mean embedded?'
    """
    near = difflib.get_close_matches(value, list(known), n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def settings_of(config: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields that can be set; others follow from them."""
    return tuple(field for field in dataclasses.fields(config) if field.init)


def names_of(field: dataclasses.Field[Any]) -> list[str]:
    """The field's own name, and its alias if it has one."""
    return [name for name in (field.name, field.metadata.get("alias")) if name]


def metavar_of(field: dataclasses.Field[Any]) -> str:
    """The placeholder of the value in the help, by its type or by how the name ends."""
    if field.metadata.get("metavar"):
        return str(field.metadata["metavar"])
    if not isinstance(field.default, str):
        return {int: "N", float: "X"}[type(field.default)]
    endings = {
        "address": "HOST:PORT",
        "server": "HOST:PORT",
        "listen": "HOST:PORT",
        "to": "HOST:PORT",
        "host": "HOST",
        "dtype": "DTYPE",
        "device": "DEVICE",
        "tokens": "N|auto",
        "outcomes": "N|auto",
        "depth": "N|auto",
        "key": "KEY",
    }
    endings |= dict.fromkeys(("model", "target", "draft", "tokenizer"), "DIR_OR_ID")
    return endings.get(field.name.rpartition("_")[2], "NAME")


def read_config(config: type[Config], args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """The config from flags, variables, the file of `--config` and defaults, in this order. ConfigError names
    the flag, the variable or the key of the file, and its value."""
    fields = settings_of(config)
    flagged = {field.name: getattr(args, field.name) for field in fields if field.name in args}
    from_environ = {
        field.name: _parse_env(field, environ[name])
        for field in fields
        if (name := env_name(field.name)) in environ
        and field.name not in flagged
        and not _is_of_kubernetes(name, environ[name])
    }
    path = getattr(args, "config", None)
    if path == "":
        raise ConfigError("--config: names no file")
    from_file, keys = parse_mapping(f"{path}: ", _read_yaml(path), fields) if path is not None else ({}, {})
    labels = {field.name: f"{metavar_of(field)} " for field in fields if field.metadata.get("positional")}
    labels |= {name: f"{path}: {key}: " for name, key in keys.items() if name not in flagged}
    labels |= {name: f"environment variable {env_name(name)}=" for name in from_environ}
    labels |= {name: f"{flag} " for name, flag in getattr(args, "given", {}).items()}
    values = from_file | from_environ | flagged
    _check_implied(fields, values)
    args.sources = {name: (label, values.get(name)) for name, label in labels.items()}
    try:
        return config(**values)
    except ConfigError as error:
        raise as_given(error, args) from None


def _check_implied(fields: Iterable[dataclasses.Field[Any]], given: Mapping[str, Any]) -> None:
    """ConfigError of a switch that is off beside what implies it."""
    for field in fields:
        for other in field.metadata.get("implied_by", ()):
            if given.get(field.name) is False and given.get(other):
                raise ConfigError(f"{flag_name('no_' + field.name)}: is given with {flag_name(other)}")


def parse_mapping(
    where: str, given: Mapping[Any, Any], fields: Sequence[dataclasses.Field[Any]]
) -> tuple[dict[str, Any], dict[str, object]]:
    """Values of fields from a mapping, whose keys are the names of flags, with - or _; and their keys.
    ConfigError names, after `where`, the key that is unknown, given twice or of another type."""
    known = {name: field for field in fields for name in names_of(field)}
    values: dict[str, Any] = {}
    keys: dict[str, object] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{where}{key}: is not known{did_you_mean(name, known)}")
        field = known[name]
        if field.name in values:
            raise ConfigError(f"{where}{key}: is given twice")
        values[field.name], keys[field.name] = _of_type(f"{where}{key}", type(field.default), value), key
    return values, keys


def _read_yaml(path: str) -> dict[Any, Any]:
    """The mapping that a YAML file is; empty for an empty file. ConfigError names the file."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(f"--config {path}: needs pip install 'specwire[serve]' (yaml is missing)") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            without_repeats([(str(key.value), None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    try:
        found = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: is nested too deeply") from None
    except (OSError, ValueError) as error:  # of bytes that are no text, or a number of thousands of digits
        raise ConfigError(f"--config {path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's own text repeats the line, perhaps a secret
        where = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path}: is not YAML{where}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path}: is no mapping of flags to values")
    return found


def _of_type(what: str, kind: type[Any], value: Any) -> Any:
    """A value of YAML for a field of that type, or ConfigError. A number is also a text, and a mapping is one
    in JSON."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is float and is_number:
        return float(value)
    if kind is str and (is_number or isinstance(value, dict)):
        try:
            return json.dumps(value)
        except (TypeError, ValueError) as error:  # such as a date of YAML
            raise ConfigError(f"{what}: is no JSON ({error})") from None
    if kind is str and isinstance(value, list):
        return ",".join(map(str, value))
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text; quote it"}[kind]
    raise ConfigError(f"{what}: must be {expected}")


def as_given(error: SpecwireError, args: argparse.Namespace | None) -> SpecwireError:
    """An error whose message begins with a flag, or has flags with their values, with the names by which
    `read_config` found these: `--max-num-seqs`, a variable, a key of the file."""
    if not isinstance(error, ConfigError | ModelLoadError):
        return error
    message = str(error)
    for name, (label, value) in getattr(args, "sources", {}).items():
        flag = re.escape(flag_name(name))
        said = rf"^{flag} |(?<![\w-]){flag} (?={re.escape(str(value))}(?![\w/.-]))"
        message = re.sub(said, lambda _: label, message)  # noqa: B023 - called at once
    return type(error)(message)


def known_variables(configs: Iterable[type[Any]]) -> set[str]:
    """The variables that these configs are read from."""
    return {env_name(field.name) for config in configs for field in settings_of(config)}


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
