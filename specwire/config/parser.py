"""The parser of command lines, with a flag for each field of a config, and the help of these.

A usage error is the reason and where to read more, with the nearest name.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from specwire.config.flags import (
    did_you_mean,
    env_name,
    flag_name,
    metavar_of,
    names_of,
    read_config,
    settings_of,
)

_GROUPS = {
    "model": """
        target model dtype device tensor_parallel_size ray_address replicas num_threads tokenizer
        chat_template max_model_len seed batch_invariant lora_modules cuda_graphs least_pass_ms load_timeout_s
        step_timeout_s start_timeout_s""",
    "speculation": """
        draft num_draft_tokens max_depth speculative_config rule verify_ahead num_outcomes max_outcomes
        suffix_shared support_mass max_support target_tokenizer inner heads layers mtp dflash eagle3
        draft_model draft_placement draft_dtype draft_device draft_num_threads draft_rtt_ms draft_timeout_ms
        draft_learn draft_learn_share learn learn_share learn_rate learn_shared learn_out""",
    "memory and batches": """
        num_kv_tokens kv_cache_memory gpu_memory_utilization page_size prefix_sharing max_num_tokens
        max_prefill_tokens max_sequences max_running max_waiting""",
    "server": """
        host port address http_address model_name listen to workers grace_s idle_timeout_s max_message_bytes
        max_body_bytes max_prompt_bytes lenient cors_origin allowed_hosts metrics_from tool_call_parser
        sampling_defaults""",
    "connections": """
        server verify_address draft_address timeout_s connect_timeout_s failover_timeout_s patience_s rtt_ms
        jitter_ms bandwidth_mbps""",
    "security": """
        api_key tokens tls_cert tls_key tls_client_ca allow_plaintext tls tls_ca client_cert client_key
        server_name token token_file peer_ca peer_cert peer_key peer_server_name peer_token_file""",
    "logs and metrics": "log_level log_format metrics_address metrics_names trace_detail",
}
TITLES = {name: title for title, names in _GROUPS.items() for name in names.split()}
"""The title under which the help of a command lists a field; titles and fields in this order."""
_PLACES = {name: place for place, name in enumerate(TITLES)}
OTHER = "flags"


class Parser(argparse.ArgumentParser):
    """Of a command, whose subcommands have parsers of this class too. Flags cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | kwargs)
        self._commands: Mapping[str, Parser] = {}

    def add_subparsers(self, **kwargs: Any) -> Any:
        """As `argparse`."""
        commands = super().add_subparsers(**kwargs)
        self._commands = commands.choices
        return commands

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. Without the usage, which is longer than a screen."""
        self.exit(2, f"error: {message}\nsee {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As `argparse`, but what is not known is an error here: the caller of a subcommand does not know its
        flags."""
        words = list(sys.argv[1:] if args is None else args)
        if self._commands and words:
            self._check_command(words[0])
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_near(unknown, self._flags())}")
        return found, []

    def _check_command(self, word: str) -> None:
        """Refuse a first word that is neither a subcommand nor a flag; the value of an unknown flag would be
        taken for a subcommand."""
        if word in ("--", *self._commands, *self._flags()):
            return
        if not word.startswith("-"):
            known = did_you_mean(word, self._commands)
            self.error(f"{word!r} is not one of {', '.join(self._commands)}{known}")
        if near := _near([word], self._flags()):
            self.error(f"unrecognized arguments: {word}{near}")
        of_commands = [flag for command in self._commands.values() for flag in command._flags()]
        self.error(f"{word}: flags of a command follow the command{_near([word], of_commands)}")

    def _flags(self) -> list[str]:
        """Argparse has no public list of them."""
        return [flag for action in self._actions for flag in action.option_strings]


def add_command(
    commands: Any,
    name: str,
    about: str,
    config: type[Any],
    run: Callable[[Any, argparse.Namespace], int],
    *,
    has_file: bool = False,
    **kwargs: Any,
) -> argparse.ArgumentParser:
    """Add a command with the flags of a config.

    Args:
        run: runs it, with the config that was read and all that was given.
        has_file: whether it has `--config`, for a file of flags.
        kwargs: of its parser; the help keeps the lines of an epilog.
    """
    if "epilog" in kwargs:
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
    kwargs = {"description": about[0].upper() + about[1:] + "."} | kwargs
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, **kwargs)
    if has_file:
        add_config_file(command)
    add_flags(command, config)
    command.set_defaults(run=lambda args: run(read_config(config, args, os.environ), args))
    return command


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, config: type[Any]) -> None:
    """Add one flag for each field, in groups; a flag that is not given is absent from the namespace."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in sorted(settings_of(config), key=lambda field: _PLACES.get(field.name, len(_PLACES))):
        title = TITLES.get(field.name, OTHER)
        if field.metadata.get("flag", "secret" not in field.metadata):
            if isinstance(parser, argparse.ArgumentParser) and title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_flag(groups.get(title, parser), field)


def _add_flag(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, field: dataclasses.Field[Any]
) -> None:
    default = "" if field.default == "" else f"default {field.default}; "
    about = f"{field.metadata['doc']} ({default}{env_name(field.name)})".replace("%", "%%")
    kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": about}
    if field.metadata.get("positional"):
        parser.add_argument(field.name, nargs="?", metavar=metavar_of(field), **kwargs)
        return
    if isinstance(field.default, bool):
        kwargs["action"] = argparse.BooleanOptionalAction
    else:
        kwargs["type"] = type(field.default)
        kwargs["metavar"] = metavar_of(field)
        kwargs["action"] = StoreNamed
        if field.metadata.get("list"):
            kwargs["nargs"] = "+"
    names = [*map(flag_name, names_of(field))]
    if isinstance(field.default, bool):  # four words of one switch would be a line of their own
        for name in names[1:]:
            parser.add_argument(name, dest=field.name, **kwargs | {"help": argparse.SUPPRESS})
        names = names[:1]
    parser.add_argument(*names, dest=field.name, **kwargs)


class StoreNamed(argparse.Action):
    """Stores a value, several words with commas, and in `given` by which of its names the flag was given."""

    def __call__(
        self, _parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, ",".join(values) if isinstance(values, list) else values)
        namespace.given = {**getattr(namespace, "given", {}), self.dest: option_string}


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, which `read_config` reads."""
    about = "YAML file with flags, as num_draft_tokens: 4; flags and variables win over it"
    parser.add_argument("--config", metavar="FILE.yaml", help=about)


def _near(words: Sequence[str], known: Collection[str]) -> str:
    """A suggestion for the first flag among these words that has one."""
    flags = (word.partition("=")[0] for word in words if word.startswith("-"))
    return next(filter(None, (did_you_mean(flag, known) for flag in flags)), "")
