"""YAML files of flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specwire.errors import ConfigError


def read_yaml(path: str) -> dict[Any, Any]:
    """The mapping that a YAML file is; empty for an empty file.

    Raises:
        ConfigError: naming the file, which is missing, not YAML, or no mapping.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(f"--config {path}: needs pip install 'specwire[serve]' (yaml is missing)") from None
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
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


def of_type(what: str, kind: type[Any], value: Any) -> Any:
    """A value of YAML for a field of that type. A number is also a text, and a mapping is one in JSON.

    Raises:
        ConfigError: it is of another type.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is float and is_number:
        return float(value)
    if kind is str and (is_number or isinstance(value, dict)):
        return json.dumps(value)
    if kind is str and isinstance(value, list):
        return ",".join(map(str, value))
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text; quote it"}[kind]
    raise ConfigError(f"{what}: must be {expected}")
