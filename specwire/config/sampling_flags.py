"""One command line flag for each field of `SamplingParams`, shared by the commands that generate."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specwire.config.fields import AUTO
from specwire.config.flags import flag_name
from specwire.config.models import RULES, parse_max_depth, parse_num_draft_tokens
from specwire.core import SamplingParams
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
    for field in dataclasses.fields(SamplingParams):
        if field.name == "grammar":
            _add_grammar_flags(parser)
        elif field.name not in omit:
            kwargs = {"dest": _dest(field.name), **_FLAGS[field.name]}
            default = defaults.get(field.name, field.default)
            if not isinstance(default, bool) and isinstance(default, int | float | str):
                kwargs = kwargs | {"help": f"{kwargs['help']} (default {default})"}
            group.add_argument(flag_name(field.name), default=argparse.SUPPRESS, **kwargs)
    parser.set_defaults(**defaults)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags set.

    Raises:
        InvalidRequestError, ConfigError: naming the parameter and its value.
    """
    names = {f.name: _dest(f.name) for f in dataclasses.fields(SamplingParams)}
    values = {name: getattr(args, dest) for name, dest in names.items() if dest in args}
    values["logit_bias"] = dict(values.get("logit_bias", ()))
    for name, parse in (("num_draft_tokens", parse_num_draft_tokens), ("max_depth", parse_max_depth)):
        if name in values:
            values[name] = parse(values[name])
    if values.get("rule") == AUTO:
        del values["rule"]
    given = {kind: getattr(args, f"grammar_{kind}") for kind in _GRAMMARS if f"grammar_{kind}" in args}
    return SamplingParams(**values, grammar=Grammar(**given) if given else None)


def _add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """One for each kind; `Grammar` refuses two of them."""
    group = parser.add_argument_group("what the output must match")
    for kind, (flag, kwargs) in _GRAMMARS.items():
        group.add_argument(flag, dest=f"grammar_{kind}", default=argparse.SUPPRESS, **kwargs)


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

_FLAGS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N", "help": "most tokens to emit"},
    "temperature": {"type": float, "metavar": "X", "help": "divides the logits; 0 is greedy"},
    "top_k": {"type": int, "metavar": "N", "help": "keep the N likeliest tokens; 0 keeps all"},
    "top_p": {"type": float, "metavar": "X", "help": "keep the smallest set with this mass"},
    "min_p": {"type": float, "metavar": "X", "help": "drop tokens less likely than X times the likeliest"},
    "repetition_penalty": {"type": float, "metavar": "X", "help": "over 1 penalizes tokens seen before"},
    "presence_penalty": {"type": float, "metavar": "X", "help": "subtracted once from tokens in the output"},
    "frequency_penalty": {"type": float, "metavar": "X", "help": "subtracted once per occurrence"},
    "logit_bias": {"type": _bias, "action": "append", "metavar": "ID=X", "help": "add X to a token's logit"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "string that ends the output; may be repeated"},
    "stop_token_ids": {"type": token_ids, "metavar": "1,2", "help": "token ids that end the output"},
    "ignore_eos": {"action": "store_true", "help": "continue past the end-of-sequence token"},
    "min_tokens": {"type": int, "metavar": "N", "help": "tokens that no stop condition ends"},
    "skip_special_tokens": {
        "action": argparse.BooleanOptionalAction,
        "help": "leave special tokens out of the text",
    },
    "seed": {"type": int, "metavar": "N", "help": "fixes all random choices"},
    "rule": {"choices": RULES, "help": "how draft and target are reconciled; auto: the server chooses"},
    "max_depth": {"metavar": "N|auto", "help": "longest path of a token tree; 0 for chains"},
    "num_draft_tokens": {"metavar": "N|auto", "help": "draft tokens a round; 0 disables speculation"},
    "draft": {
        "metavar": "NAME",
        "help": "what proposes: ngram, suffix, unigram, bigram, trigram; model; both as ngram,model; or off",
    },
    "logprobs": {
        "type": int,
        "metavar": "N",
        "help": "report log probabilities, and those of the N likeliest",
    },
    "prompt_logprobs": {
        "type": int,
        "metavar": "N",
        "help": "report log probabilities of the prompt's tokens, and those of the N likeliest",
    },
    "num_beams": {"type": int, "metavar": "N", "help": "beam search with N beams, at temperature 0"},
    "length_penalty": {"type": float, "metavar": "X", "help": "of beam search: over 0 favours long texts"},
    "early_stopping": {
        "type": _early_stopping,
        "metavar": "true|false|never",
        "help": "of beam search: end it with N finished texts",
    },
    "num_return_sequences": {"type": int, "metavar": "N", "help": "of beam search: texts in the completion"},
    "cache_salt": {"metavar": "TEXT", "help": "share cached prompts with requests of the same salt only"},
}
