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
from specwire.core import SamplingParams
from specwire.errors import ConfigError, ServiceUnavailableError
from specwire.text import tokenizer
from tools.bench import flags, prompts
from tools.bench.backends import Backend, Coordinator, OpenAIServer, parameters
from tools.bench.prompts import BUILT_IN, Prompt

_PATHS = {flags.OPENAI: "/v1/completions", flags.OPENAI_CHAT: "/v1/chat/completions"}


class BenchTarget:
    """The server that the flags name; its models and prompts are known once it is open.

    Attributes:
        address: of a coordinator of ours, or a base URL.
        model_id, draft_model_id: names; empty for none.

    Raises:
        ConfigError: a flag that the backend has no use for, or a file that cannot be used.
    """

    def __init__(self, args: argparse.Namespace, config: ClientConfig, params: SamplingParams) -> None:
        self._args, self._config = args, config
        self._is_random = args.dataset_name == flags.RANDOM
        if args.dataset_name in (flags.SHAREGPT, flags.CUSTOM) and args.prompts is None:
            raise ConfigError(f"--dataset-name {args.dataset_name}: needs --dataset-path FILE")
        if args.backend == flags.SPECWIRE:
            for name in ("base_url", "endpoint", "model", "tokenizer"):
                if getattr(args, name):
                    raise ConfigError(f"--{name.replace('_', '-')}: needs --backend openai or openai-chat")
        else:
            if not args.base_url:
                raise ConfigError(f"--backend {args.backend}: needs --base-url URL")
            extras.require(f"--backend {args.backend}", "bench")
            _check_url(args.base_url)
            if not os.environ.get("OPENAI_API_KEY", "").isascii():
                raise ConfigError("OPENAI_API_KEY: has characters that no header can have")
            parameters(params)
        self.address: str = args.base_url or config.server
        self.model_id, self.draft_model_id = args.model, ""
        self.prompts: Sequence[Prompt] = ()
        if args.dataset_name == flags.SHAREGPT:
            self.prompts = prompts.sharegpt(args.prompts, args.num_requests, args.seed)
        elif args.prompts is not None and not self._is_random:
            self.prompts = prompts.read(args.prompts, args.given["prompts"])
        elif args.backend != flags.SPECWIRE:
            self.prompts = self._texts()

    def _texts(self) -> list[Prompt]:
        """For a server that does not tell its vocabulary."""
        if not self._is_random:
            return [Prompt(text=text) for text in BUILT_IN]
        source = self._args.tokenizer or self._args.model
        known = tokenizer.load(source) if source else None
        if known is None:
            raise ConfigError(f"--dataset-name random: needs --tokenizer DIR_OR_ID for {self._args.backend}")
        drawn = self._random(known.vocab_size)
        return [Prompt(text=known.decode(one.token_ids or ()), max_tokens=one.max_tokens) for one in drawn]

    def _random(self, vocab_size: int) -> list[Prompt]:
        lengths = self._args.random_input_len, self._args.random_output_len
        return prompts.random_tokens(self._args.num_requests, *lengths, vocab_size, self._args.seed)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Backend]:
        """Ask for the models.

        Raises:
            SpecwireError: nothing serves there, or it names no model.
        """
        args, config = self._args, self._config
        if args.backend == flags.SPECWIRE:
            async with AsyncClient(self.address, timeout_s=config.timeout_s, **config.credentials) as client:
                model, draft = await client.get_model_info()
                self.model_id, self.draft_model_id = model.name, draft.name if draft else ""
                made = self._random(model.vocab_size) if self._is_random else prompts.built_in(model)
                self.prompts = self.prompts or made
                yield Coordinator(client)
            return
        import httpx2

        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=None)  # an open loop does not wait for a connection
        async with httpx2.AsyncClient(
            base_url=self.address, headers=headers, timeout=config.timeout_s, limits=limits
        ) as http:
            self.model_id = self.model_id or await self._first_model(http)
            path = args.endpoint or _PATHS[args.backend]
            yield OpenAIServer(http, path, self.model_id, is_chat=args.backend == flags.OPENAI_CHAT)

    async def _first_model(self, client: Any) -> str:
        import httpx2

        try:
            answer = await client.get("/v1/models")
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except httpx2.HTTPError as error:
            raise ServiceUnavailableError(f"nothing serves at {self.address}: {error}") from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"--base-url {self.address}: names no model; give --model NAME") from None


def _check_url(url: str) -> None:
    """Raises ConfigError of one that no request can be sent to."""
    import httpx2

    try:
        parsed = httpx2.URL(url)
        is_usable = parsed.scheme in ("http", "https") and parsed.host != "" and (parsed.port or 80) < 1 << 16
    except httpx2.InvalidURL:
        is_usable = False
    if not is_usable:
        raise ConfigError(f"--base-url {url}: is not http://HOST[:PORT] or https://HOST[:PORT]")
