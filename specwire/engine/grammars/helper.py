"""Compiles grammars in processes of their own: one that does not end, or takes too much memory, is killed.

    service ── grammar ──▶ helper ── fork ──▶ child, with limits
            ◀─ compiled ──        ◀─ compiled, or it was killed

xgrammar cannot be interrupted, and holds what it has allocated until it ends. The helper imports it once and
has a single thread, so a fork costs milliseconds and finds no lock held. Messages are pickled.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import sys
import time
import types
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specwire import parent

COMPILE_S = 5.0
"""Processor time of a grammar, in seconds."""
_WALL_S = 20.0
"""The same by the clock, which a busy machine stretches."""
_MAX_MEMORY = 1 << 30
_MAX_BYTES = 1 << 26
"""Of a compiled grammar."""
_NUM_PROBES = 256
"""Tokens along which that is measured."""
_PROBE_S = 0.02
"""Processor time of the mask of one position, in seconds: a pass waits for it."""
_NICENESS = 19
_FORKING = multiprocessing.get_context("fork")
_TOO_MUCH = f"takes more than {COMPILE_S:g} s or {_MAX_MEMORY >> 20} MiB to compile"


class GrammarVocabulary(NamedTuple):
    """The tokens that grammars are matched along.

    Attributes:
        texts: by token id; None where a token stands for no text.
        vocab_size: width of the logits, at least as many.
        end_ids: tokens that end an output.
    """

    texts: Sequence[bytes | None]
    vocab_size: int
    end_ids: Sequence[int]


class Reply(NamedTuple):
    """A grammar as it was compiled, serialised; or why it was refused."""

    compiled: str = ""
    problem: str = ""


def main() -> None:
    """Answer grammars until the service closes the pipe."""
    parent.end_with_it()
    os.nice(_NICENESS)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # xgrammar logs what it refuses
    compiler = _compiler(pickle.load(requests))
    with contextlib.suppress(EOFError):
        while True:
            pickle.dump(_answer(compiler, *pickle.load(requests)), replies)
            replies.flush()


def tokenizer_info(vocabulary: GrammarVocabulary) -> Any:
    """The vocabulary as xgrammar has it."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        [text or b"" for text in vocabulary.texts],  # one without text is never allowed
        vocab_size=vocabulary.vocab_size,
        stop_token_ids=list(vocabulary.end_ids),
    )


def _import_lightly() -> None:
    """Import xgrammar without torch and transformers: 0.3 s and 60 MB instead of 2 to 4 s and 550 MB.

    Compiling and masks of numpy use neither; xgrammar only names their classes when it is imported. If that
    fails without them, it is repeated with the real ones. Afterwards both stay replaced by modules whose
    classes have no instances, and what needs more fails.
    """
    names = ("torch", "transformers")
    sys.modules |= dict.fromkeys(names)  # type: ignore[arg-type]  # tvm_ffi tries torch, and does without
    with contextlib.suppress(ImportError):
        import tvm_ffi  # noqa: F401
    sys.modules |= {name: _Unused(name) for name in names}
    try:
        import xgrammar
    except Exception:
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("xgrammar", *names):
                del sys.modules[name]
        import xgrammar  # noqa: F401


class _Unused(types.ModuleType):
    """A module of which all that is asked for is a class without instances."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _UnusedClass


class _UnusedClass:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Constants are made of it."""


_OF_LIMITED, _OF_JSON = "9,1,34,34,92,92,13,13,10,10,", "9,1,34,34,92,92,0,31,0,31,"
r"""As xgrammar serialises them, the characters that it takes in strings of limited length, `[^"\\\r\n]`, and
those that JSON allows there without an escape, `[^"\\\0-\x1f]`."""


def _compiler(vocabulary: GrammarVocabulary) -> Any:
    _import_lightly()
    import xgrammar

    return xgrammar.GrammarCompiler(tokenizer_info(vocabulary), max_threads=1, cache_enabled=False)


def _answer(compiler: Any, kind: str, value: Any) -> Reply:
    """Of a child process; of why it ended, if it did without one."""
    receiving, sending = _FORKING.Pipe(duplex=False)
    child = _FORKING.Process(target=_run_child, args=(compiler, kind, value, sending))
    child.start()
    sending.close()
    with receiving:
        try:
            return receiving.recv() if receiving.poll(_WALL_S) else Reply(problem=_TOO_MUCH)
        except EOFError:
            return Reply(problem=_TOO_MUCH)
        finally:
            child.kill()
            child.join()


def _run_child(compiler: Any, kind: str, value: Any, sending: Connection) -> None:
    size = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + _MAX_MEMORY,) * 2)
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(COMPILE_S),) * 2)
    with contextlib.suppress(MemoryError):  # no answer: it takes too much
        sending.send(_compile(compiler, kind, value))


def _compile(compiler: Any, kind: str, value: Any) -> Reply:
    try:
        compiled = _compiled(compiler, kind, value)
        slowest_s = _slowest_mask_s(compiled)
        text = compiled.serialize_json()
    except (MemoryError, RuntimeError, ValueError) as error:
        is_too_large = isinstance(error, MemoryError) or "bad_alloc" in str(error)
        # Without the time and the source line that an error of xgrammar begins with.
        message = re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", str(error).strip())
        reason = message.splitlines()[0][:300] if message else "no reason given"
        return Reply(problem=_TOO_MUCH if is_too_large else f"is refused: {reason}")
    if slowest_s > _PROBE_S:
        return Reply(problem=f"takes {slowest_s * 1e3:.0f} ms a token to match, over {_PROBE_S * 1e3:.0f}")
    if len(text) > _MAX_BYTES:
        return Reply(problem=f"takes {len(text)} bytes when it is compiled, over {_MAX_BYTES}")
    return Reply(text)


def _compiled(compiler: Any, kind: str, value: Any) -> Any:
    if kind == "json_object":
        kind, value = "json_schema", '{"type": "object"}'
    if kind == "json_schema":
        import xgrammar

        # On one line: where any space may follow, a small model may write spaces without end.
        text = xgrammar.Grammar.from_json_schema(value, any_whitespace=False).serialize_json()
        value = xgrammar.Grammar.deserialize_json(text.replace(_OF_LIMITED, _OF_JSON))
    if kind == "regex":
        return compiler.compile_regex(value)
    if kind == "choice":
        value = "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    return compiler.compile_grammar(value)


def _slowest_mask_s(compiled: Any) -> float:
    """The longest that one mask takes along a random text, in seconds of processor time."""
    import xgrammar

    info, rng, slowest_s = compiled.tokenizer_info, random.Random(0), 0.0
    matcher, mask = xgrammar.GrammarMatcher(compiled), np.zeros((1, -(-info.vocab_size // 32)), np.int32)
    for _ in range(_NUM_PROBES):
        spent_s = _mask_s(matcher, mask)
        if spent_s > _PROBE_S:  # or the machine was busy
            spent_s = min(spent_s, _mask_s(matcher, mask), _mask_s(matcher, mask))
        slowest_s = max(slowest_s, spent_s)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        choices = np.setdiff1d(allowed, info.stop_token_ids)
        if slowest_s > _PROBE_S or not len(choices) or not matcher.accept_token(int(rng.choice(choices))):
            break
    return slowest_s


def _mask_s(matcher: Any, mask: npt.NDArray[np.int32]) -> float:
    started_s = time.process_time()
    matcher.fill_next_token_bitmask(mask)
    return time.process_time() - started_s
