"""Which server a benchmark measures, by its flags: its backend, its models, and prompts for it."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from specwire.client.client import AsyncClient
from specwire.config import extras
from specwire.config.client import ClientConfig
from specwire.core import ModelInfo, SamplingParams
from specwire.errors import ConfigError, ServiceUnavailableError
from specwire.text import tokenizer
from tools.bench import flags, prompts
from tools.bench.backends import Backend, Coordinator, OpenAIServer, parameters
from tools.bench.prompts import BUILT_IN, Prompt

_PATHS = {flags.OPENAI: "/v1/completions", flags.OPENAI_CHAT: "/v1/chat/completions"}


def target(args: argparse.Namespace, config: ClientConfig, params: SamplingParams) -> _Specwire | _OpenAI:
    """The server that the flags name; its models and prompts are known once it is open.

    Raises:
        ConfigError: a flag that the backend has no use for, or a file that cannot be used.
    """
    if args.dataset_name in (flags.SHAREGPT, flags.CUSTOM) and args.prompts is None:
        raise ConfigError(f"--dataset-name {args.dataset_name}: needs --dataset-path FILE")
    if args.backend == flags.SPECWIRE:
        for name in ("base_url", "endpoint", "model", "tokenizer"):
            if getattr(args, name):
                raise ConfigError(f"--{name.replace('_', '-')}: needs --backend openai or openai-chat")
        return _Specwire(args, config)
    if not args.base_url:
        raise ConfigError(f"--backend {args.backend}: needs --base-url URL")
    extras.require(f"--backend {args.backend}", "bench")
    parameters(params)
    return _OpenAI(args, config)


def _from_files(args: argparse.Namespace) -> list[Prompt] | None:
    """Prompts that need to know nothing of the server."""
    if args.dataset_name == flags.SHAREGPT:
        return prompts.sharegpt(args.prompts, args.num_requests, args.seed)
    if args.dataset_name == flags.RANDOM or args.prompts is None:
        return None
    return prompts.read(args.prompts)


def _random(args: argparse.Namespace, vocab_size: int) -> list[Prompt]:
    lengths = args.random_input_len, args.random_output_len
    return prompts.random_tokens(args.num_requests, *lengths, vocab_size, args.seed)


class _Specwire:
    """A coordinator."""

    def __init__(self, args: argparse.Namespace, config: ClientConfig) -> None:
        self._args = args
        self._config = config
        self.address = config.server
        self.model_id = self.draft_model_id = ""
        self.prompts: Sequence[Prompt] = _from_files(args) or ()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Backend]:
        config = self._config
        async with AsyncClient(config.server, timeout_s=config.timeout_s, **config.credentials) as client:
            model, draft = await client.get_model_info()
            self.model_id, self.draft_model_id = model.name, draft.name if draft else ""
            self.prompts = self.prompts or self._made_for(model)
            yield Coordinator(client)

    def _made_for(self, model: ModelInfo) -> list[Prompt]:
        if self._args.dataset_name == flags.RANDOM:
            return _random(self._args, model.vocab_size)
        return prompts.built_in(model)


class _OpenAI:
    """A server with OpenAI's API."""

    def __init__(self, args: argparse.Namespace, config: ClientConfig) -> None:
        self._args = args
        self._timeout_s = config.timeout_s
        self.address = args.base_url
        self.model_id, self.draft_model_id = args.model, ""
        self.prompts: Sequence[Prompt] = self._texts()

    def _texts(self) -> list[Prompt]:
        if self._args.dataset_name != flags.RANDOM:
            return _from_files(self._args) or [Prompt(text=text) for text in BUILT_IN]
        source = self._args.tokenizer or self._args.model
        known = tokenizer.load(source) if source else None
        if known is None:
            raise ConfigError(f"--dataset-name random: needs --tokenizer DIR_OR_ID for {self._args.backend}")
        drawn = _random(self._args, known.vocab_size)
        return [Prompt(text=known.decode(one.token_ids or ()), max_tokens=one.max_tokens) for one in drawn]

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Backend]:
        import httpx2

        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=None)  # an open loop does not wait for a connection
        async with httpx2.AsyncClient(
            base_url=self.address, headers=headers, timeout=self._timeout_s, limits=limits
        ) as client:
            self.model_id = self.model_id or await self._first_model(client)
            path = self._args.endpoint or _PATHS[self._args.backend]
            yield OpenAIServer(client, path, self.model_id, is_chat=self._args.backend == flags.OPENAI_CHAT)

    async def _first_model(self, client: Any) -> str:
        import httpx2

        try:
            answer = await client.get("/v1/models")
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except httpx2.HTTPError as error:
            raise ServiceUnavailableError(f"nothing serves at {self.address}: {error}") from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"--base-url {self.address}: names no model; give --model NAME") from None
