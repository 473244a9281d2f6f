"""A beam search whose verify service is killed, or hangs, in mid-search, as real processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specwire import Client, Completion, SamplingParams
from specwire.cli.process import Service, wait_ready
from tests.support.fleet import START_S, flag_list, hung_device, stopped
from tests.support.harness import handshake
from tests.support.pairs import save_good_draft, save_target

PROMPT = [5, 9, 11, 2, 7, 4]
BEAMS = SamplingParams(
    temperature=0, ignore_eos=True, num_beams=4, num_return_sequences=4, max_tokens=40, num_draft_tokens=6
)
LEAST_PASSES = 5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Pair:
    """Two verify services of one model, a draft, a coordinator."""

    def __init__(self, directory: Path) -> None:
        models = {"verify": save_target(directory / "target"), "draft": save_good_draft(directory / "draft")}
        flags = {"address": "127.0.0.1:0", "dtype": "float32", "grace_s": 0, "num_kv_tokens": 16384}
        self.verifies = [
            Service("verify_service", flag_list({**flags, "model": models["verify"], "least_pass_ms": 20}))
            for _ in range(2)
        ]
        self.draft = Service("draft_service", flag_list({**flags, "model": models["draft"]}))
        wait_ready([*self.verifies, self.draft], START_S)
        self.coordinator = Service(
            "coordinator",
            flag_list(
                {
                    "address": "127.0.0.1:0",
                    "verify_address": ",".join(one.address for one in self.verifies),
                    "draft_address": self.draft.address,
                }
            ),
        )
        self.address = self.coordinator.ready(START_S)

    def close(self) -> None:
        for service in (self.coordinator, self.draft, *self.verifies):
            service.kill()

    def num_passes(self, index: int) -> int:
        return int(handshake("verify", self.verifies[index].address).status.num_steps)

    def searched(self, client: Client) -> Completion:
        return client.generate(params=BEAMS, prompt_token_ids=PROMPT)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with contextlib.closing(Pair(tmp_path_factory.mktemp("models"))) as running:
        yield running


@pytest.mark.parametrize("fault", ["stop", "hang", "kill"])
def test_a_search_survives_the_loss_of_its_target(pair: Pair, fault: str) -> None:
    """SIGSTOP, a device that hangs, or SIGKILL: the texts of a search without a fault."""
    with Client(pair.address) as client, contextlib.ExitStack() as stack:
        expected = pair.searched(client).hypotheses
        before = [pair.num_passes(i) for i in range(2)]
        searching = stack.enter_context(ThreadPoolExecutor(1)).submit(pair.searched, client)

        def passes() -> list[int]:
            return [pair.num_passes(i) - before[i] for i in range(2)]

        while max(at_fault := passes()) < LEAST_PASSES:
            assert not searching.done()
        victim = int(at_fault[1] > at_fault[0])
        service = pair.verifies[victim]
        if fault == "kill":
            service.process.send_signal(signal.SIGKILL)
        else:
            stack.enter_context(stopped(service) if fault == "stop" else hung_device(service, "verify"))
        done = searching.result(timeout=120)
        assert pair.num_passes(1 - victim) - before[1 - victim] > at_fault[1 - victim]
        assert done.timing.failover_ms > 0
    for one, other in zip(done.hypotheses, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.score == pytest.approx(other.score, rel=1e-4)
