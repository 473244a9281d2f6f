"""The model that the coordinator serves: name, limits, and the tokenizer that spells its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from specwire import AsyncClient, embedded
from specwire.config.client import HttpConfig
from specwire.config.models import EMBEDDED
from specwire.core import ModelInfo
from specwire.errors import HandshakeError, ModelLoadError, ServiceUnavailableError
from specwire.http.answer_cache import AnswerCache
from specwire.rpc.wire import tokenizer_files
from specwire.rpc.wire.tokenizer_files import TokenizerFiles
from specwire.text.tokenizer import Tokenizer

Spell = Callable[[int], str]
"""One token for display."""
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServedModel:
    """The target, under the name that clients ask for, and its draft model, if there is one; and the bearer
    token of the caller, who may know all of this."""

    name: str
    info: ModelInfo
    draft: ModelInfo | None = None
    token: str = field(default="", repr=False)

    @property
    def names(self) -> list[str]:
        """All that may be asked for: the model's own, then those of its adapters."""
        return [self.name, *(name for name in self.info.adapters if name != self.name)]


class Models:
    """Asks the coordinator which model it serves, which also checks a bearer token."""

    def __init__(self, client: AsyncClient, config: HttpConfig) -> None:
        self._client = client
        self._config = config
        self._answers = AnswerCache(self._ask)
        self._loading = asyncio.Lock()
        self._loaded = ("", "", "")
        self._tokenizer: Tokenizer | None = None

    async def served(self, token: str) -> ServedModel:
        """The model that is currently served, for the caller with this token; raises as `Entry.model`."""
        return await self._answers.get(token)

    async def _ask(self, token: str) -> ServedModel:
        info, draft = await self._client.get_model_info(timeout_s=_TIMEOUT_S, token=token)
        return ServedModel(self._config.model_name or info.name, info, draft, token)

    async def speller(self, model: ServedModel) -> Spell:
        """Spells the model's tokens. Raises as `tokenizer`."""
        found = await self.tokenizer(model)
        return found.spell if found else "token_id:{}".format

    async def tokenizer(self, model: ServedModel) -> Tokenizer | None:
        """The model's tokenizer, loaded the first time; None if it has none.

        Raises:
            ServiceUnavailableError: it cannot be loaded here, or the coordinator does not send it.
            SpecwireError: the coordinator does not answer.
        """
        info = model.info
        source = self._config.tokenizer or info.tokenizer_source
        wanted = source, info.tokenizer_hash, info.chat_template
        async with self._loading:
            if wanted != self._loaded:
                try:
                    files = await self._files(model)
                    name = self._config.tokenizer or info.name
                    self._tokenizer = await asyncio.to_thread(_load, files, name, info.chat_template)
                except (HandshakeError, ModelLoadError) as error:
                    raise ServiceUnavailableError(str(error)) from None
                self._loaded = wanted
        return self._tokenizer

    async def _files(self, model: ServedModel) -> TokenizerFiles:
        source = self._config.tokenizer
        if source:
            directory = embedded.TARGET_DIR if source == EMBEDDED else source
            return await asyncio.to_thread(tokenizer_files.read, directory)
        return await self._client.get_tokenizer(token=model.token)


def _load(files: TokenizerFiles, name: str, template: str) -> Tokenizer | None:
    """With the coordinator's chat template where that is not the model's own."""
    loaded = files.load(name)
    is_own = loaded is None or template in ("", loaded.tool_template)
    return loaded if is_own else files.load(name, chat_template=template)
