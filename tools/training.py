"""What trainings of drafts share: the target and the text, gradient steps, what an interruption leaves."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specwire.engine.boot import model_directory, resolve
from specwire.engine.heads.files import replace_file
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.loading import errors_naming, load_weights, read_config
from specwire.errors import ConfigError
from specwire.support import IntArray
from specwire.text import tokenizer
from specwire.text.tokenizer import Tokenizer
from tools.drafts import Advance, TargetTextConfig, TrainingConfig
from tools.files import make_directory, read_text

_CHARS = 16
"""Of the text that are encoded for each token that is wanted."""
_SAVE_STEPS = 50
_STEPS = "descent.pt"


class Kept(NamedTuple):
    """What is kept in case of an interruption, under the name of what is trained: what is there under another
    one is not used."""

    directory: Path
    name: str

    def narrowed(self, *settings: object) -> Kept:
        """With a name that says these settings too."""
        return self._replace(name=" ".join([self.name, *map(str, settings)]))

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


def prepared(config: TrainingConfig, least: int) -> tuple[Any, IntArray, str, Kept]:
    """The target in float32 on the CPU, as transformers runs it; the text's tokens, int64 [num_tokens], of
    which there must be `least`; the fingerprint of the target's weights; what an interruption has left.

    Raises:
        ConfigError: the text is too short, or is no UTF-8.
        ModelLoadError: the target cannot be loaded, or has no tokenizer.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    source = resolve(config.target, "verify")
    loaded, text = tokenizer_and_text(config)
    token_ids = np.array(loaded.encode(text[: _CHARS * config.tokens])[: config.tokens], np.int64)
    if len(token_ids) < least:
        raise ConfigError(f"--text {config.text}: {len(token_ids)} tokens are too few; needs {least}")
    out = Path(config.out)
    make_directory("--out", out)
    with errors_naming(source):
        read_config(source)
        model = load_weights(source, "float32")
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        model.requires_grad_(False)
    fingerprint = weights_fingerprint(model_directory(source))
    text_name = hashlib.blake2b(token_ids.tobytes(), digest_size=16).hexdigest()
    directory = out / "training"
    make_directory("--out", directory)
    return model, token_ids, fingerprint, Kept(directory, f"{fingerprint} {text_name}")


def tokenizer_and_text(config: TargetTextConfig) -> tuple[Tokenizer, str]:
    """The target's tokenizer, and the text; errors as of `prepared`."""
    loaded = tokenizer.load(resolve(config.target, "verify"))
    if loaded is None:
        raise ConfigError(f"--target {config.target}: has no tokenizer")
    return loaded, read_text("--text", config.text)


def descend(
    optimizers: Sequence[torch.optim.Optimizer],
    loss_at: Callable[[int], Tensor],
    rate_at: Callable[[int], float],
    num_steps: int,
    kept: Kept,
    advance: Advance,
) -> None:
    """Gradient steps on what the optimizers hold, those before an interruption included; `loss_at` and
    `rate_at` give the loss and the learning rate of a step."""
    parameters = [each for of in optimizers for group in of.param_groups for each in group["params"]]
    num_done = 0
    if before := kept.load(_STEPS):
        with torch.no_grad():
            for parameter, saved in zip(parameters, before["parameters"], strict=True):
                parameter.copy_(saved)
        for optimizer, state in zip(optimizers, before["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        num_done = before["num_done"]
    advance(num_done)
    for step in range(num_done, num_steps):
        torch.autograd.backward(loss_at(step))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        advance(1)
        if (step + 1) % _SAVE_STEPS == 0:
            states = [optimizer.state_dict() for optimizer in optimizers]
            kept.save(_STEPS, {"num_done": step + 1, "parameters": parameters, "optimizers": states})
