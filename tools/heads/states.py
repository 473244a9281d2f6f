"""What heads are trained on: a text, and the target's hidden states along it.

The target runs the text in windows. States go to a file as they are computed, so that a training that was
interrupted goes on where it was, and memory does not grow with the text.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specwire.engine.heads.files import replace_file
from specwire.engine.model.states import States
from specwire.support import IntArray
from tools.drafts import Advance

WINDOW = 512
"""Tokens of a window; its first ones have little before them, as in a short prompt."""
_STATES, _PROGRESS = "states.float16", "states.pt"


class Kept(NamedTuple):
    """What is kept in case of an interruption, under the name of what is trained: what is there under another
    one is not used."""

    directory: Path
    name: str

    def save(self, file: str, what: dict[str, Any]) -> None:
        """Write this as a whole."""
        data = io.BytesIO()
        torch.save(what | {"name": self.name}, data)
        replace_file(self.directory / file, data.getvalue())

    def load(self, file: str) -> dict[str, Any]:
        """What was saved there; empty if nothing was under this name."""
        path = self.directory / file
        found: dict[str, Any] = torch.load(path) if path.is_file() else {}
        return found if found.get("name") == self.name else {}


class Text(NamedTuple):
    """Tokens with the target's states.

    Attributes:
        token_ids: int64 [num_tokens].
        states: float16 [num_tokens, state_size], after each token, in a file.
    """

    token_ids: IntArray
    states: npt.NDArray[np.float16]

    def starts(self, num_following: int) -> Tensor:
        """int64: the tokens that so many others of their window follow."""
        index = torch.arange(len(self.token_ids))
        return index[(index % WINDOW < WINDOW - num_following) & (index < len(index) - num_following)]

    def states_at(self, index: Tensor) -> Tensor:
        """Float32 [n, state_size]."""
        return torch.from_numpy(self.states[index.numpy()]).float()


@torch.inference_mode()
def run_text(model: Any, token_ids: IntArray, kept: Kept, advance: Advance) -> Text:
    """The states of a text, of which those that are kept already are not computed again.

    Args:
        advance: told of tokens.
    """
    state_size = model.get_output_embeddings().weight.shape[1]
    num_done: int = kept.load(_PROGRESS).get("num_tokens", 0)
    shape = len(token_ids), state_size
    mode: Any = "r+" if num_done else "w+"
    states = np.memmap(kept.directory / _STATES, np.float16, mode, shape=shape)
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
    return Text(token_ids, states)
