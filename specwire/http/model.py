"""What the coordinator says: its cached answers, and the model with the tokenizer that spells its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from specwire import AsyncClient, embedded
from specwire.config.client import OPENAI, HttpConfig
from specwire.config.models import EMBEDDED
from specwire.core import ModelInfo
from specwire.errors import HandshakeError, ModelLoadError, ServiceUnavailableError
from specwire.rpc.wire import tokenizer_files
from specwire.rpc.wire.tokenizer_files import TokenizerFiles
from specwire.text.tokenizer import Tokenizer

Spell = Callable[[int], str]
"""One token for display."""
_TIMEOUT_S = 5.0
_FRESH_S = 1.0
"""Lifetime of an answer: a restarted coordinator may serve another model."""
_MAX_ANSWERS = 1024
"""Bounds memory under a flood of wrong tokens; older answers are evicted."""
Answer = TypeVar("Answer")


class AnswerCache(Generic[Answer]):
    """Answers and errors by bearer token; concurrent requests with the same one share an answer."""

    def __init__(self, ask: Callable[[str], Coroutine[Any, Any, Answer]]) -> None:
        self._ask = ask
        self._asked: dict[str, asyncio.Task[Answer]] = {}

    async def get(self, token: str) -> Answer:
        """The answer, at most a second old; raises what `ask` raises."""
        if token not in self._asked:
            if len(self._asked) >= _MAX_ANSWERS:
                del self._asked[next(iter(self._asked))]
            self._asked[token] = asyncio.create_task(self._ask(token))
            self._asked[token].add_done_callback(lambda task: self._keep(token, task))
        return await asyncio.shield(self._asked[token])  # others may wait for it as well

    def _keep(self, token: str, task: asyncio.Task[Answer]) -> None:
        if not task.cancelled():
            task.exception()  # retrieved, as all who waited for it may have disconnected
        asyncio.get_running_loop().call_later(_FRESH_S, self._forget, token, task)

    def _forget(self, token: str, task: asyncio.Task[Answer]) -> None:
        if self._asked.get(token) is task:
            del self._asked[token]


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
        """The model that is currently served, for the caller with this token.

        Raises:
            UnauthenticatedError: the coordinator does not know the token.
            SpecwireError: the coordinator does not answer.
        """
        return await self._answers.get(token)

    async def _ask(self, token: str) -> ServedModel:
        info, draft = await self._client.get_model_info(timeout_s=_TIMEOUT_S, token=token)
        if self._config.sampling_defaults == OPENAI:
            info = replace(info, sampling={})
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
