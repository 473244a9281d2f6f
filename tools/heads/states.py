"""What heads are trained on: the target's hidden states along a text.

The target runs the text in windows. States go to a file as they are computed, so that a training that was
interrupted goes on where it was, and memory does not grow with the text.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specwire.engine.heads.model import States
from specwire.support import IntArray
from tools.drafts import Advance
from tools.training import Kept

WINDOW = 512
"""Tokens of a window; its first ones have little before them, as in a short prompt."""
_STATES, _PROGRESS = "states.float16", "states.pt"


@torch.inference_mode()
def run_text(model: Any, token_ids: IntArray, kept: Kept, advance: Advance) -> npt.NDArray[np.float16]:
    """The states of a text, float16 [num_tokens, state_size], after each token; those that are kept already
    are not computed again. `advance` is told of tokens."""
    state_size = model.get_output_embeddings().weight.shape[1]
    num_done: int = kept.load(_PROGRESS).get("num_tokens", 0)
    shape = len(token_ids), state_size
    with (kept.directory / _STATES).open("r+b" if num_done else "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * shape[0] * shape[1])  # or a full disk ends the process later
        states = np.memmap(file, np.float16, "r+", shape=shape)
    shown = States(model)
    advance(num_done)
    for start in range(num_done, len(token_ids), WINDOW):
        window = token_ids[start : start + WINDOW]
        logits = model(input_ids=torch.from_numpy(window)[None].to(model.device), use_cache=False).logits[0]
        found = shown.beside(logits)[:, logits.shape[1] :]
        states[start : start + len(window)] = found.to("cpu", torch.float16).numpy()
        states.flush()
        kept.save(_PROGRESS, {"num_tokens": start + len(window)})
        advance(len(window))
    return states
