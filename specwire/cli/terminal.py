"""A generation on a terminal: each token coloured by its fate, and underlined if drafted from the text.

Colours as in figure 1 of Leviathan et al. (2023): accepted green, rejected red and struck through, recovered
and bonus blue. A token of a round without draft tokens, the target's alone, is grey.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specwire.client.client import Client
from specwire.completion import Chunk, Completion, Speculation, Token
from specwire.config.speculative import FROM_TEXT
from specwire.core import Fate, SamplingParams

_FATES = {
    Fate.ACCEPTED: "\x1b[32m",
    Fate.REJECTED: "\x1b[31;9m",
    Fate.RECOVERED: "\x1b[34m",
    Fate.BONUS: "\x1b[34m",
    Fate.PLAIN: "\x1b[90m",
}
_UNDERLINED = "\x1b[4m"
_LEGEND = {
    "accepted": _FATES[Fate.ACCEPTED],
    "rejected": _FATES[Fate.REJECTED],
    "recovered or bonus": _FATES[Fate.BONUS],
    "target alone": _FATES[Fate.PLAIN],
    "from the text": _UNDERLINED,
}
_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Text with control characters made visible: a model's output must not control the terminal."""
    return text.translate(_CONTROLS)


def dim(text: str, colour: bool) -> str:
    """Text of less weight."""
    return _paint(text, _DIM, colour)


def legend() -> list[str]:
    """What each colour says, in that colour."""
    return [_paint(words, code, True) for words, code in _LEGEND.items()]


def stream(client: Client, prompt: str, params: SamplingParams, title: str, colour: bool) -> Completion:
    """Generate, and write the text under a title as it comes."""
    by_fate = colour and params.num_draft_tokens != 0
    print("\n" + " ".join([dim(title, colour), *(legend() if by_fate else [])]))
    print(_paint(printable(prompt), _BOLD, colour), end="", flush=True)
    with client.stream(prompt, params) as running:
        for chunk in running:
            sys.stdout.write(painted_chunk(chunk) if by_fate else printable(chunk.text))
            sys.stdout.flush()
        print()
        return running.completion


def table(rows: Sequence[tuple[str, str]], colour: bool) -> list[str]:
    """Lines of names and values."""
    return [dim(f"{name:>19}", colour) + f"  {value}" for name, value in rows]


def aligned(rows: Sequence[Sequence[str]], *, num_words: int | None = None, colour: bool = False) -> str:
    """Columns under their names.

    Args:
        num_words: columns of words; those after them have figures, to the right. None for words alone.
        colour: whether the names are of less weight.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = []
    for row in rows:
        columns = enumerate(zip(row, widths, strict=True))
        cells = [
            cell.ljust(width) if num_words is None or i < num_words else cell.rjust(width)
            for i, (cell, width) in columns
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join([dim(texts[0], colour), *texts[1:]])


def passes(counts: Speculation) -> str:
    """Tokens and passes; with passes of both kinds, what each kind brought, which adds up to the tokens."""
    words = f"{counts.num_tokens} tokens in {counts.num_rounds} passes, {counts.tokens_per_round:.2f} a pass"
    if not 0 < counts.num_drafts < counts.num_rounds:
        return words
    drafted = f"{counts.num_drafts} with drafts, {counts.mean_acceptance_length:.2f} each"
    return f"{words}: {drafted}, {counts.num_rounds - counts.num_drafts} without"


def say_why_plain(done: Completion, params: SamplingParams) -> None:
    """To a person at a terminal, on standard error; not where the request asks for plain decoding itself."""
    is_default = params.draft is None and params.num_draft_tokens is None
    if is_default and done.speculation.why_plain and sys.stderr.isatty():
        print(f"decoded plainly: {done.speculation.why_plain}", file=sys.stderr)


def painted_chunk(chunk: Chunk) -> str:
    """Its tokens, with a rejected one before the one that replaced it."""
    recovered = [i for i, token in enumerate(chunk.tokens) if token.fate is Fate.RECOVERED]
    split = recovered[-1] if recovered else len(chunk.tokens)  # it may be held back until it is certain
    return "".join(map(_painted, (*chunk.tokens[:split], *chunk.rejected, *chunk.tokens[split:])))


def _painted(token: Token) -> str:
    text = printable(token.text)
    if token.fate is Fate.REJECTED:  # a struck-out line break must not break the line
        text = text.replace("\n", "⏎")
    return _paint(text, _FATES[token.fate] + (_UNDERLINED if token.source in FROM_TEXT else ""), True)


def _paint(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{_RESET}" if colour and text else text
