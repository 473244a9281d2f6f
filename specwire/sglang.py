"""Drafts from another machine inside SGLang: the algorithm SPECWIRE, which an entry point registers.

    SPECWIRE_DRAFT_ADDRESS=10.0.0.7:7071 python -m sglang.launch_server --model-path MODEL \\
        --speculative-algorithm SPECWIRE --speculative-num-draft-tokens 8 --disable-overlap-schedule

SGLang's worker for drafts from n-grams judges fixed numbers of nodes; this one puts the draft's chain in
their place. Everything else is `coordinator.batches`. docs/vllm.md says how to use it, and that it ran with a
stand-in of SGLang alone.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import numpy as np

from coordinator.batches import BatchDrafter, StepRow
from specwire.core import ModelInfo
from specwire.text import tokenizer
from specwire.vllm import read_options

NAME = "SPECWIRE"


def register() -> None:
    """Make the algorithm known; the entry point `sglang.srt.plugins` calls it in each process."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        def is_ngram(self) -> bool:
            return True

    SpeculativeAlgorithm.register(NAME, supports_overlap=False, spec_class=Algorithm)(worker_class)


def worker_class(server_args: Any) -> type[Any]:
    """SGLang's worker for n-grams, with drafts of a service."""
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class RemoteDraftWorker(NGRAMWorker):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            is_first = get_tp_group().rank_in_group == 0
            self._chains = SglangChains(server_args, self.draft_token_num) if is_first else None

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            found: Any = self._chains.of(batch.reqs) if self._chains is not None else None
            group = get_tp_group()
            return group.broadcast_object(found, src=0) if group.world_size > 1 else found

    return RemoteDraftWorker


class SglangChains:
    """The draft's chains in SGLang's form: a request's last token and those after it, and who sees whom."""

    def __init__(self, server_args: Any, width: int) -> None:
        """Connect.

        Args:
            width: nodes of a request, its last token included.
        """
        loaded = tokenizer.load(server_args.tokenizer_path or server_args.model_path)
        target = ModelInfo(
            name=server_args.model_path,
            vocab_size=loaded.vocab_size if loaded else 0,
            context_len=server_args.context_length or 1 << 20,
            tokenizer_fingerprint=loaded.fingerprint if loaded else "",
        )
        self._width = width
        self._drafts = BatchDrafter(read_options({}, os.environ), target, width - 1)
        atexit.register(self._drafts.close)
        self._lengths: dict[str, int] = {}

    def of(self, requests: Any) -> tuple[Any, Any]:
        """[num_requests * width] tokens and [num_requests * width * width] mask. What no chain fills is token
        0, which is accepted only where the target says so, too."""
        rows, lengths = [], {}
        for request in requests:
            token_ids = np.array([*request.origin_input_ids, *request.output_ids], dtype=np.int32)
            num_tokens = lengths[request.rid] = len(token_ids)
            rows.append(
                StepRow(token_ids, num_tokens, max(1, num_tokens - self._lengths.get(request.rid, 0)))
            )
        self._lengths = lengths
        drafted = np.zeros((len(rows), self._width), dtype=np.int64)
        for i, (row, chain) in enumerate(zip(rows, self._drafts.propose(rows), strict=True)):
            drafted[i, : 1 + len(chain)] = [row.token_ids[-1], *chain]
        mask = np.tile(np.tril(np.ones((self._width, self._width), dtype=bool)), (len(rows), 1, 1))
        return drafted.ravel(), mask.ravel()
