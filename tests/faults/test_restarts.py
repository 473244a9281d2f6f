"""A draft that goes and comes back: what a completion, the status and a running generation show of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import draft_service.service
from specwire import Client, SamplingParams
from specwire.config.services import DraftConfig
from specwire.core import Fate
from tests.support.harness import LoopThread, local_stack
from tests.support.processes import wait_until

PROMPT = "The quick brown"


class RestartableDraft:
    """A draft service that goes away and comes back on the same port."""

    def __init__(self, thread: LoopThread, model: Path) -> None:
        self._thread = thread
        self._model = str(model)
        self._context = contextlib.ExitStack()
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        config = DraftConfig(model=self._model, dtype="float32", address=self.address, grace_s=0.0)
        running = self._thread.entered(lambda: draft_service.service.serving(config))
        self.address = self._context.enter_context(running)

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def client_and_draft(pair: tuple[Path, Path]) -> Iterator[tuple[Client, RestartableDraft]]:
    """Of a stack of their own."""
    with (
        contextlib.closing(LoopThread()) as thread,
        contextlib.closing(RestartableDraft(thread, pair[1])) as draft,
        local_stack(pair[0], coordinator_options={"draft_address": draft.address}) as stack,
    ):
        yield stack.client, draft


class TestRestarts:
    GREEDY = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, num_draft_tokens=4)

    def test_the_draft_goes_and_comes_back(self, client_and_draft: tuple[Client, RestartableDraft]) -> None:
        client, draft = client_and_draft
        undisturbed = client.generate(PROMPT, self.GREEDY)
        with client.stream(PROMPT, self.GREEDY) as stream:
            chunks = iter(stream)
            next(chunks)
            draft.close()
            list(chunks)
            done = stream.completion
        assert done.token_ids == undisturbed.token_ids
        assert 0 < done.speculation.num_draft_tokens < undisturbed.speculation.num_draft_tokens
        assert done.speculation.draft_unavailable != ""
        assert client.get_status().draft_unavailable != ""
        assert client.get_model_info()[1] is None
        draft.start()
        wait_until(lambda: client.get_status().draft_unavailable == "", 10)
        # The first rounds with a draft that has failed do not wait for it.
        assert client.generate(PROMPT, self.GREEDY).token_ids == undisturbed.token_ids
        again = client.generate(PROMPT, self.GREEDY)
        assert again.speculation.num_accepted_tokens == undisturbed.speculation.num_accepted_tokens

    def test_a_running_generation_takes_the_draft_up_again(
        self, client_and_draft: tuple[Client, RestartableDraft]
    ) -> None:
        client, draft = client_and_draft
        params = replace(self.GREEDY, max_tokens=4000)
        with client.stream(PROMPT, params) as stream:
            chunks = iter(stream)
            next(chunks)
            draft.close()
            draft.start()
            after = skip_until_plain(chunks)
            fates = (token.fate for chunk in after for token in chunk.tokens)
            assert Fate.ACCEPTED in fates, "no draft again"


def skip_until_plain(chunks: Iterator[Any]) -> Iterator[Any]:
    """From the fifth plain token in a row: by then no draft is there."""
    num_plain = 0
    for chunk in chunks:
        for token in chunk.tokens:
            num_plain = num_plain + 1 if token.fate is Fate.PLAIN else 0
        if num_plain >= 5:
            break
    assert num_plain >= 5
    yield from chunks
