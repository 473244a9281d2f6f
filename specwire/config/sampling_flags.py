"""A command line flag for each field of `SamplingParams`, shared by the commands that generate."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specwire.config.fields import AUTO, parse_count
from specwire.config.flags import flag_name
from specwire.config.models import RULES
from specwire.core import KINDS, MAX_NUM_DRAFT_TOKENS, PARAMETERS, SamplingParams
from specwire.text.grammar import Grammar


def add_sampling_flags(
    parser: argparse.ArgumentParser, *, omit: Collection[str] = (), **defaults: Any
) -> None:
    """Add the flags.

    Args:
        omit: fields for which the command has a flag of its own.
        defaults: where the command's differ from those of `SamplingParams`.
    """
    group = parser.add_argument_group("sampling")
    for name, field in PARAMETERS.items():
        if name == "grammar":  # a flag for each kind; `Grammar` refuses two of them
            grammars = parser.add_argument_group("what the output must match")
            for kind, (flag, kwargs) in _GRAMMARS.items():
                grammars.add_argument(flag, dest=f"grammar_{kind}", default=argparse.SUPPRESS, **kwargs)
        elif name not in omit:
            kwargs = _flag(name) | {"dest": _dest(name), "default": argparse.SUPPRESS}
            default = defaults.get(name, field.default)
            if not isinstance(default, bool) and isinstance(default, int | float):
                kwargs["help"] += f" (default {default})"
            group.add_argument(flag_name(name), **kwargs)
    parser.set_defaults(**defaults)


def _flag(name: str) -> dict[str, Any]:
    """How argparse reads a parameter: by its type, or by `_FORMS`; the help is its first sentence."""
    doc = PARAMETERS[name].metadata["doc"].partition(". ")[0].rstrip(".").replace("`", "")
    kinds: dict[type, dict[str, Any]] = {
        int: {"type": int, "metavar": "N"},
        float: {"type": float, "metavar": "X"},
        bool: {"action": "store_true"},
        str: {"metavar": "TEXT"},
    }
    form = _FORMS.get(name) or kinds[KINDS[name]]
    return form | {"help": doc[0].lower() + doc[1:]}


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags set; InvalidRequestError or ConfigError names one and its value."""
    values = {name: getattr(args, _dest(name)) for name in PARAMETERS if _dest(name) in args}
    values["logit_bias"] = dict(values.get("logit_bias", ()))
    for name in {"num_draft_tokens", "max_depth"} & values.keys():
        values[name] = parse_count(name, values[name], MAX_NUM_DRAFT_TOKENS)
    if values.get("rule") == AUTO:
        del values["rule"]
    given = {kind: getattr(args, f"grammar_{kind}") for kind in _GRAMMARS if f"grammar_{kind}" in args}
    return SamplingParams(**values, grammar=Grammar(**given) if given else None)


def _content(path: str) -> str:
    """Of a file, for argparse's `type`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def _dest(name: str) -> str:
    """In the namespace; `draft` of a command that starts services is a model."""
    return "request_draft" if name == "draft" else name


def token_ids(text: str) -> list[int]:
    """`1,2,3` to ids, for argparse's `type`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of token ids") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID=BIAS") from None


def _early_stopping(text: str) -> bool | str:
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not true, false or never")
    return values[text]


_GRAMMARS: dict[str, tuple[str, dict[str, Any]]] = {
    "json_schema": (
        "--json-schema",
        {"type": _content, "metavar": "FILE", "help": "JSON of this JSON schema"},
    ),
    "json_object": ("--json-object", {"action": "store_true", "help": "a JSON object"}),
    "regex": ("--regex", {"metavar": "REGEX", "help": "text that it matches as a whole"}),
    "choice": ("--choice", {"action": "append", "metavar": "TEXT", "help": "one of these; may be repeated"}),
    "ebnf": ("--grammar", {"type": _content, "metavar": "FILE", "help": "text of this grammar, in GBNF"}),
}

_FORMS: dict[str, dict[str, Any]] = {
    "logit_bias": {"type": _bias, "action": "append", "metavar": "ID=X"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": {"type": token_ids, "metavar": "1,2"},
    "skip_special_tokens": {"action": argparse.BooleanOptionalAction},
    "rule": {"choices": RULES},
    "num_draft_tokens": {"metavar": "N|auto"},
    "max_depth": {"metavar": "N|auto"},
    "early_stopping": {"type": _early_stopping, "metavar": "true|false|never"},
}
"""Of parameters that are not one number, switch or text."""
