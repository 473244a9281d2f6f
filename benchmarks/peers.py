"""transformers' own decoding in a process of its own: plain, assisted, and many requests at once.

The parent writes one JSON order a line and reads one JSON answer a line. The clock runs inside the peer,
around `generate` alone, so that the pipe costs it nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.batching import BatchAnswer, BatchGenerator, BatchOrder
from benchmarks.pipes import ask, end, start_module


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
        first_s: until the first tokens were there.
        elapsed_s: prefill and decoding.
        num_passes: forward passes of the target.
    """

    first_s: float
    elapsed_s: float
    token_ids: list[int]
    num_passes: int


class Peer:
    """The process, seen from the parent; a context manager that ends it."""

    def __init__(
        self,
        target: Path,
        draft: Path,
        dtype: str,
        draft_dtype: str,
        num_threads: int,
        device: str = "cpu",
    ) -> None:
        options = ["--num-threads", str(num_threads), "--device", device]
        models = [str(target), str(draft), "--dtype", dtype, "--draft-dtype", draft_dtype]
        self._process = start_module("benchmarks.peers", *models, *options)

    def run(self, order: Order) -> Answer:
        """Have it generate; raises RuntimeError when the process has ended."""
        return Answer(**ask(self._process, {"kind": "one", "order": asdict(order)}))

    def run_batch(self, order: BatchOrder) -> BatchAnswer:
        """Have it generate for many prompts at once; errors as for `run`."""
        return BatchAnswer(**ask(self._process, {"kind": "batch", "order": asdict(order)}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)


class Generator:
    """Both models as transformers loads them, with its default attention for the machine."""

    def __init__(self, target: str, draft: str, dtype: str, draft_dtype: str, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval().to(device)
        self._draft: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=draft_dtype).eval()
        self._draft.to(device)
        self._device = device
        self._defaults = {name: getattr(self._draft.generation_config, name) for name in _ASSISTANT_SETTINGS}
        self._num_passes = 0
        self.target.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self._num_passes += 1

    def run(self, order: Order) -> Answer:
        """Generate exactly `max_new_tokens` tokens, as specwire does with `ignore_eos`."""
        import torch

        torch.manual_seed(order.seed)
        prompt = torch.tensor([list(order.prompt_token_ids)], device=self._device)
        options = self._options(order)
        self._num_passes = 0
        watch = _FirstTokens()
        started_s = time.perf_counter()
        with torch.inference_mode():
            out = self.target.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=watch, **options
            )
        token_ids = out[0, prompt.shape[1] :].tolist()  # waits for a device
        elapsed_s = time.perf_counter() - started_s
        return Answer(
            first_s=watch.at_s - started_s,
            elapsed_s=elapsed_s,
            token_ids=token_ids,
            num_passes=self._num_passes,
        )

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


class _FirstTokens:
    """A streamer of transformers that notes when the first tokens came."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self._num_calls = 0

    def put(self, _: Any) -> None:
        """The prompt comes first, then what each pass brings."""
        self._num_calls += 1
        if self._num_calls == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""


def main(argv: list[str] | None = None) -> int:
    """Serve orders until standard input ends."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers")
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--draft-dtype", required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    generator = Generator(args.target, args.draft, args.dtype, args.draft_dtype, args.device)
    batches = BatchGenerator(generator.target)
    for line in sys.stdin:
        order = json.loads(line)
        answer = (
            generator.run(Order(**order["order"]))
            if order["kind"] == "one"
            else batches.run(BatchOrder(**order["order"]))
        )
        print(json.dumps(asdict(answer)), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
