"""What the coordinator serves: its name, its limits, and the tokenizer that goes with it."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from specwire import AsyncClient, embedded, tokenizer
from specwire.client_config import HttpConfig
from specwire.config import EMBEDDED
from specwire.core import ModelInfo
from specwire.tokenizer import Tokenizer

_FRESH_S = 1.0
"""How long an answer is good for: a coordinator may come back with another model."""
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServedModel:
    """The target, under the name that clients ask for."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer | None

    def spell(self, token_id: int) -> str:
        """One token for display."""
        return self.tokenizer.spell(token_id) if self.tokenizer else f"token_id:{token_id}"


class Models:
    """Asks the coordinator which model it serves, and keeps the tokenizer of that one."""

    def __init__(self, client: AsyncClient, config: HttpConfig) -> None:
        self._client = client
        self._config = config
        self._loading = asyncio.Lock()
        self._served: ServedModel | None = None
        self._asked_by = ""
        self._asked_s = -math.inf

    async def served(self, token: str) -> ServedModel:
        """The model that is served now.

        Args:
            token: bearer token of whoever asks.

        Raises:
            SpecwireError: the coordinator does not say.
            ModelLoadError: its tokenizer cannot be loaded here.
        """
        fresh = time.monotonic() - self._asked_s < _FRESH_S
        if self._served and fresh and token == self._asked_by:
            return self._served
        info, _ = await self._client.get_model_info(timeout_s=_TIMEOUT_S, token=token)
        async with self._loading:
            self._served = await self._with_tokenizer(info)
        self._asked_by, self._asked_s = token, time.monotonic()
        return self._served

    async def _with_tokenizer(self, info: ModelInfo) -> ServedModel:
        name = self._config.model_name or info.name
        if self._served and _tokenizer_of(self._served.info) == _tokenizer_of(info):
            return ServedModel(name, info, self._served.tokenizer)
        source = self._config.tokenizer or info.tokenizer_source
        return ServedModel(name, info, await asyncio.to_thread(_load, source))


def _tokenizer_of(info: ModelInfo) -> tuple[str, str]:
    """A model and its tuned sister have one table of tokens, and each a chat template of its own."""
    return info.tokenizer_fingerprint, info.tokenizer_source


def _load(source: str) -> Tokenizer | None:
    if not source:
        return None
    return tokenizer.load(embedded.TARGET_DIR if source == EMBEDDED else source)
