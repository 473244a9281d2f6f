"""The parser of command lines: a usage error is the reason and where to read more, with the nearest name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from specwire.config.flags import add_config_file, add_flags, did_you_mean


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
    run: Callable[[argparse.Namespace], int],
    *,
    has_file: bool = False,
) -> argparse.ArgumentParser:
    """Add a command with the flags of a config, and `--config` for a file of them; `run` runs it."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about[0].upper() + about[1:] + "."
    )
    if has_file:
        add_config_file(command)
    add_flags(command, config)
    command.set_defaults(run=run)
    return command


def _near(words: Sequence[str], known: Collection[str]) -> str:
    """A suggestion for the first flag among these words that has one."""
    flags = (word.partition("=")[0] for word in words if word.startswith("-"))
    return next(filter(None, (did_you_mean(flag, known) for flag in flags)), "")
