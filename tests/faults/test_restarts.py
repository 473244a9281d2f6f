"""Services that go and come back while a coordinator uses them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coordinator.service
import draft_service.service
import verify_service.service
from specwire import Client, GenerationLostError, SamplingParams, ServiceUnavailableError
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from tests.support import texts
from tests.support.harness import LoopThread
from tests.support.processes import wait_until
from tests.support.refusals import refused

PROMPT = "The quick brown"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return texts.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


class Restartable:
    """A model service that goes away and comes back on the same port."""

    def __init__(self, thread: LoopThread, role: str, model: Path) -> None:
        self._thread = thread
        self._role = role
        self._model = model
        self._context = contextlib.ExitStack()
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        kind, module = {
            "draft": (DraftConfig, draft_service.service),
            "verify": (VerifyConfig, verify_service.service),
        }[self._role]
        config = kind(model=str(self._model), dtype="float32", address=self.address, grace_s=0.0)
        self.address = self._context.enter_context(self._thread.entered(lambda: module.serving(config)))

    def stop(self) -> None:
        self._context.close()


@pytest.fixture
def restartables(pair: tuple[Path, Path]) -> Iterator[tuple[Client, Restartable, Restartable]]:
    """A client, the verify service and the draft service of a stack of their own."""
    with contextlib.ExitStack() as stack:
        thread = LoopThread()
        stack.callback(thread.close)
        verify = Restartable(thread, "verify", pair[0])
        stack.callback(verify.stop)
        draft = Restartable(thread, "draft", pair[1])
        stack.callback(draft.stop)
        config = CoordinatorConfig(
            verify_address=verify.address, draft_address=draft.address, grace_s=0.0, failover_timeout_s=3.0
        )
        address = stack.enter_context(thread.entered(lambda: coordinator.service.serving(config)))
        yield stack.enter_context(Client(address)), verify, draft


class TestRestarts:
    GREEDY = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, num_draft_tokens=4)

    def test_the_draft_goes_and_comes_back(
        self, restartables: tuple[Client, Restartable, Restartable]
    ) -> None:
        client, _, draft = restartables
        undisturbed = client.generate(PROMPT, self.GREEDY)
        with client.stream(PROMPT, self.GREEDY) as stream:
            chunks = iter(stream)
            next(chunks)
            draft.stop()
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
        self, restartables: tuple[Client, Restartable, Restartable]
    ) -> None:
        client, _, draft = restartables
        params = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
        with client.stream(PROMPT, params) as stream:
            chunks = iter(stream)
            next(chunks)
            draft.stop()
            draft.start()
            assert any(len(chunk.tokens) > 2 for chunk in skip_until_plain(chunks)), "no draft again"

    def test_the_target_restarts_on_the_same_port(
        self, restartables: tuple[Client, Restartable, Restartable]
    ) -> None:
        client, verify, _ = restartables
        undisturbed = client.generate(PROMPT, self.GREEDY)
        with client.stream(PROMPT, self.GREEDY) as stream:
            chunks = iter(stream)
            next(chunks)
            verify.stop()
            verify.start()
            list(chunks)
            assert stream.completion.token_ids == undisturbed.token_ids

    @pytest.mark.slow
    def test_the_target_goes_for_good(self, restartables: tuple[Client, Restartable, Restartable]) -> None:
        client, verify, _ = restartables
        with client.stream(PROMPT, self.GREEDY) as stream:
            chunks = iter(stream)
            next(chunks)
            verify.stop()
            started = time.monotonic()
            with refused(GenerationLostError, f"verify service {verify.address}"):
                list(chunks)
            with refused(ServiceUnavailableError, f"verify service {verify.address}"):
                client.generate(PROMPT)
            assert time.monotonic() - started < 10


def skip_until_plain(chunks: Iterator[Any]) -> Iterator[Any]:
    """From the fifth chunk of one token in a row: by then no draft is there."""
    num_plain = 0
    for chunk in chunks:
        num_plain = num_plain + 1 if len(chunk.tokens) == 1 and not chunk.rejected else 0
        if num_plain == 5:
            break
    assert num_plain == 5
    yield from chunks
