"""The parser of command lines: a usage error is the reason and where to read more, with the nearest name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from specwire.config.flags import did_you_mean


class Parser(argparse.ArgumentParser):
    """Of a command, whose subcommands have parsers of this class too. Flags cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | kwargs)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. Without the usage, which is longer than a screen."""
        self.exit(2, f"error: {message}\nsee {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As `argparse`, but what is not known is an error here: the caller of a subcommand does not know its
        flags."""
        words = list(sys.argv[1:] if args is None else args)
        self._check_begin(words)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._near(unknown, self._flags())}")
        return found, []

    def _check_begin(self, words: Sequence[str]) -> None:
        """Refuse an unknown flag before a subcommand, for which its value would be taken."""
        commands = self._commands()
        flag = words[0].partition("=")[0] if words else ""
        if not commands or not flag.startswith("-") or flag in ("--", *self._flags()):
            return
        if near := self._near([flag], self._flags()):
            self.error(f"unrecognized arguments: {flag}{near}")
        of_commands = [each for command in commands for each in command._flags()]
        self.error(f"{flag}: flags of a command follow the command{self._near([flag], of_commands)}")

    @staticmethod
    def _near(words: Sequence[str], known: Collection[str]) -> str:
        """A suggestion for the first flag among these words that has one."""
        flags = (word.partition("=")[0] for word in words if word.startswith("-"))
        return next(filter(None, (did_you_mean(flag, known) for flag in flags)), "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            problem = f"{value!r} is not one of {', '.join(known)}{did_you_mean(str(value), known)}"
            raise argparse.ArgumentError(action, problem)

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def _commands(self) -> list[Parser]:
        groups = [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]
        return [command for group in groups for command in group.choices.values()]
