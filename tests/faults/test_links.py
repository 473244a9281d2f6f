"""Seven faults on three links in two directions, and silence in both: nothing hangs, nothing is said twice,
and what was there before is there again when the link is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import pytest

from specwire import Client, Rule, SamplingParams, SpecwireError
from specwire.config.link import Link
from tests.support import report
from tests.support.effort import sized
from tests.support.faulty_proxy import Direction, FaultyProxy
from tests.support.harness import StackProxy, is_serving, local_stack, proxied

TARGET, DRAFT = "emulated:step_ms=20", "emulated:step_ms=1,alpha=0.8"
PROMPT = (1, 2, 3)
PARAMS = SamplingParams(max_tokens=60, rule=Rule.GUMBEL, seed=5)
"""Half a second of work; the rule fixes the text, even when the draft fails."""
LINKS = ("client", "draft", "verify")
"""From each of them to the coordinator."""
HEAL_S = 30.0
BOTH = (Direction.THERE, Direction.BACK)
WAYS: dict[str, Sequence[Direction]] = {"there": BOTH[:1], "back": BOTH[1:], "both": BOTH}
SILENCE_S = sized(3.0, 10.0)
CLOSE_S = sized(0.5, 3.0)
AGAIN_S = 0.25
NUM_REQUESTS = sized(2, 4)
TIMEOUT_S = 30.0
SHORT_TIMEOUT_S = 1.0
LATE_S = sized(5.0, 1.0)  # a busy machine adds to the second that the bar allows
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(sized(300, 400))]

Fault = Callable[[StackProxy, Sequence[Direction]], None]


@dataclass(frozen=True)
class Ending:
    """How a request ended.

    Attributes:
        token_ids: that came, each index once.
        status: OK, or that of the error.
        elapsed_s: from the request to its end.
        gap_s: the longest wait for a message.
    """

    token_ids: tuple[int, ...]
    status: str
    elapsed_s: float
    gap_s: float


class Rig:
    """A running stack, with a link of its own between each two that talk to each other."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        """Links that add nothing, as yet."""
        options = {"draft_timeout_ms": 1000.0}
        self.stack = running = stack.enter_context(
            local_stack(TARGET, DRAFT, draft_link=Link(), verify_link=Link(), coordinator_options=options)
        )
        client = stack.enter_context(proxied(running.address))
        self.client = stack.enter_context(Client(client.address))
        assert running.draft_proxy is not None
        assert running.verify_proxy is not None
        self.proxies = {"client": client, "draft": running.draft_proxy, "verify": running.verify_proxy}
        self.expected = running.client.generate(prompt_token_ids=PROMPT, params=PARAMS).token_ids

    def request(self, timeout_s: float) -> Ending:
        """One request, read to its end, whatever that is."""
        started_s = last_s = time.monotonic()
        gap_s = 0.0
        token_ids: list[int] = []
        status = "OK"
        try:
            with self.client.stream(params=PARAMS, prompt_token_ids=PROMPT, timeout_s=timeout_s) as stream:
                for chunk in stream:
                    gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
                    assert chunk.first_index == len(token_ids)
                    token_ids += [token.token_id for token in chunk.tokens]
                assert stream.completion.token_ids == tuple(token_ids)
        except SpecwireError as error:
            status = error.status
        now_s = time.monotonic()
        return Ending(tuple(token_ids), status, now_s - started_s, max(gap_s, now_s - last_s))

    def heal_time_s(self) -> float:
        """From now until the first request that is served as ever."""
        started_s = time.monotonic()
        while (ending := self.request(HEAL_S)).status != "OK":
            assert time.monotonic() - started_s < HEAL_S, ending
            time.sleep(0.1)
        assert ending.token_ids == self.expected
        return time.monotonic() - started_s - ending.elapsed_s


@dataclass(frozen=True)
class Case:
    """A fault on a link, and the rig that it is tried on."""

    link: str
    way: str
    rig: Rig


@pytest.fixture(scope="module")
def cases() -> Iterator[list[Case]]:
    """One for each link and direction."""
    with contextlib.ExitStack() as stack:
        ways = [way for way, directions in WAYS.items() if directions != BOTH]
        yield [Case(link, way, Rig(stack)) for link in LINKS for way in ways]


def both_ways(cases: list[Case]) -> list[Case]:
    """One for each link."""
    return [Case(case.link, "both", case.rig) for case in cases if case.way == "there"]


def together(run: Callable[[Case], None], cases: list[Case]) -> None:
    """All of them at once, for they mostly wait."""
    with ThreadPoolExecutor(len(cases)) as pool:
        for found in [pool.submit(run, case) for case in cases]:
            found.result()


def degraded(link: Link) -> Fault:
    """Another link for a while."""

    def fault(proxy: StackProxy, directions: Sequence[Direction]) -> None:
        for direction in directions:
            proxy.call(FaultyProxy.degrade, direction, link)
        time.sleep(sized(0.5, 5.0))
        for direction in directions:
            proxy.call(FaultyProxy.degrade, direction, Link())

    return fault


def repeated(act: Callable[[StackProxy, Sequence[Direction]], None]) -> Fault:
    """Now, and again for those who have connected anew."""

    def fault(proxy: StackProxy, directions: Sequence[Direction]) -> None:
        for _ in range(sized(3, 12)):
            act(proxy, directions)
            time.sleep(AGAIN_S)

    return fault


def slow_close(proxy: StackProxy, directions: Sequence[Direction]) -> None:
    for direction in directions:
        proxy.call(FaultyProxy.close_slowly, direction, CLOSE_S)


def silence(proxy: StackProxy, directions: Sequence[Direction]) -> None:
    proxy.call(FaultyProxy.stall, *directions)
    time.sleep(SILENCE_S)
    proxy.call(FaultyProxy.resume, *directions)


FAULTS: dict[str, Fault] = {
    "latency": degraded(Link(rtt_ms=200)),
    "jitter": degraded(Link(rtt_ms=40, jitter_ms=20)),
    "bandwidth": degraded(Link(bandwidth_mbps=0.2)),
    "reset": repeated(lambda proxy, directions: proxy.call(FaultyProxy.reset, *directions)),
    "half-close": repeated(lambda proxy, directions: proxy.call(FaultyProxy.half_close, *directions)),
    "slow close": repeated(slow_close),
    "silence": silence,
}
LOSSLESS = ("latency", "jitter", "bandwidth")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_each_link_in_each_direction(cases: list[Case], name: str) -> None:
    together(lambda case: try_out(case, name), cases)


@pytest.mark.slow
def test_a_link_that_is_silent_both_ways(cases: list[Case]) -> None:
    together(lambda case: try_out(case, "silence"), both_ways(cases))


@pytest.mark.slow
def test_a_deadline_in_the_silence(cases: list[Case]) -> None:
    """It ends a request that nothing else would end."""
    together(expire, cases)
    together(expire, both_ways(cases))


def expire(case: Case) -> None:
    proxy, directions = case.rig.proxies[case.link], WAYS[case.way]
    proxy.call(FaultyProxy.stall, *directions)
    ending = case.rig.request(SHORT_TIMEOUT_S)
    proxy.call(FaultyProxy.resume, *directions)
    assert ending.token_ids == case.rig.expected[: len(ending.token_ids)]
    assert ending.elapsed_s < SHORT_TIMEOUT_S + LATE_S
    typed = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "OK")
    assert ending.status in typed[: 3 if case.link == "draft" else 2]
    heal_s = case.rig.heal_time_s()
    case.rig.stack.assert_idle_within(20.0)
    measured = (
        f"ended {ending.elapsed_s - SHORT_TIMEOUT_S:+.2f} s after it, served again {heal_s:.1f} s after"
    )
    report.note(
        f"deadline of {SHORT_TIMEOUT_S:g} s in silence, {case.link}, {case.way}", ending.status, measured
    )


def try_out(case: Case, name: str) -> None:
    running, proxy, directions = case.rig, case.rig.proxies[case.link], WAYS[case.way]
    with ThreadPoolExecutor(NUM_REQUESTS + 1) as pool:
        requests = [pool.submit(running.request, TIMEOUT_S) for _ in range(NUM_REQUESTS)]
        fault = pool.submit(FAULTS[name], proxy, directions)
        while True:
            assert_serving(case)
            if wait([fault], timeout=0.5).done:
                break
        fault.result()
        healed_s = time.monotonic()
        endings = [request.result() for request in requests]
    heal_s = running.heal_time_s()
    assert time.monotonic() - healed_s < TIMEOUT_S + 30, "no hang"
    for ending in endings:
        check(ending, case, may_fail=case.link != "draft" and name not in LOSSLESS)
    assert_serving(case)
    running.stack.assert_idle_within(20.0)
    gap_s = max(ending.gap_s for ending in endings)
    statuses = ", ".join(sorted({ending.status for ending in endings}))
    measured = f"longest gap {gap_s:.1f} s, served again {heal_s:.1f} s after"
    title = f"silence of {SILENCE_S:g} s" if name == "silence" else name
    report.note(f"{title}, {case.link}, {case.way}", statuses, measured)


def assert_serving(case: Case) -> None:
    """All, asked past the links, but for a coordinator without a target, which may say so."""
    stack = case.rig.stack
    addresses = {"client": stack.address, "draft": stack.draft_address, "verify": stack.verify_address}
    for name, address in addresses.items():
        assert is_serving(address) or (case.link, name) == ("verify", "client"), name


def check(ending: Ending, case: Case, *, may_fail: bool) -> None:
    expected = case.rig.expected
    assert ending.status in (("OK", "UNAVAILABLE") if may_fail else ("OK",)), ending
    wanted = expected if ending.status == "OK" else expected[: len(ending.token_ids)]
    assert ending.token_ids == wanted
    assert ending.elapsed_s < TIMEOUT_S + 1, "the deadline"
