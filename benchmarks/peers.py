"""transformers' own decoding in a process of its own: plain `generate` and assisted generation.

The parent writes one JSON order a line and reads one JSON answer a line. The clock runs inside the peer,
around `generate` alone, so that the pipe costs it nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Order:
    """One generation.

    Attributes:
        assisted: with the draft as `assistant_model`.
        num_assistant_tokens: a constant number of guesses and no confidence threshold; None leaves
            transformers' own defaults (20 guesses, cut at a confidence of 0.4).
    """

    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int
    assisted: bool
    num_assistant_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of an order.

    Attributes:
        elapsed_s: prefill and decoding.
        num_passes: forward passes of the target.
    """

    elapsed_s: float
    token_ids: list[int]
    num_passes: int


class Peer:
    """The process, seen from the parent; a context manager that ends it."""

    def __init__(self, target: Path, draft: Path, dtype: str, draft_dtype: str, num_threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.peers", str(target), str(draft)]
        self._process = subprocess.Popen(
            [*command, "--dtype", dtype, "--draft-dtype", draft_dtype, "--num-threads", str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, order: Order) -> Answer:
        """Have it generate; raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer process ended with status {self._process.wait()}")
        return Answer(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the end of its orders
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Generator:
    """Both models as transformers loads them, with its default attention for the machine."""

    def __init__(self, target: str, draft: str, dtype: str, draft_dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        self._draft: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=draft_dtype).eval()
        self._defaults = {name: getattr(self._draft.generation_config, name) for name in _ASSISTANT_SETTINGS}
        self._num_passes = 0
        self._target.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self._num_passes += 1

    def run(self, order: Order) -> Answer:
        """Generate exactly `max_new_tokens` tokens, as specwire does with `ignore_eos`."""
        import torch

        torch.manual_seed(order.seed)
        prompt = torch.tensor([list(order.prompt_token_ids)])
        options = self._options(order)
        self._num_passes = 0
        started_s = time.perf_counter()
        with torch.inference_mode():
            out = self._target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        elapsed_s = time.perf_counter() - started_s
        token_ids = out[0, prompt.shape[1] :].tolist()
        return Answer(elapsed_s=elapsed_s, token_ids=token_ids, num_passes=self._num_passes)

    def _options(self, order: Order) -> dict[str, Any]:
        options: dict[str, Any] = {"max_new_tokens": order.max_new_tokens, "eos_token_id": None}
        if order.temperature:
            options |= {"do_sample": True, "temperature": order.temperature, "top_k": 0, "top_p": 1.0}
        else:
            options["do_sample"] = False
        if order.assisted:
            self._set_assistant(order.num_assistant_tokens)
            options["assistant_model"] = self._draft
        return options

    def _set_assistant(self, num_assistant_tokens: int | None) -> None:
        """transformers reads these off the assistant, and moves some of them as it goes: set them anew."""
        settings = self._defaults
        if num_assistant_tokens is not None:
            constant = (num_assistant_tokens, "constant", 0.0)
            settings = dict(zip(_ASSISTANT_SETTINGS, constant, strict=True))
        for name, value in settings.items():
            setattr(self._draft.generation_config, name, value)
        self._draft.generation_config.eos_token_id = None


_ASSISTANT_SETTINGS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)


def main(argv: list[str] | None = None) -> int:
    """Serve orders until standard input ends."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers")
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--draft-dtype", required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    args = parser.parse_args(argv)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.num_threads)
    generator = Generator(args.target, args.draft, args.dtype, args.draft_dtype)
    for line in sys.stdin:
        answer = generator.run(Order(**json.loads(line)))
        print(json.dumps(asdict(answer)), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
