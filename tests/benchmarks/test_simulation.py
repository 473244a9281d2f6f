"""The simulator: deterministic, and true to the closed forms."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from benchmarks.simulation import controller, virtual_time, workload
from benchmarks.simulation.controller import LEAN, WIDE_VOCAB
from benchmarks.simulation.devices import Device, StepCost
from benchmarks.simulation.network import Link
from benchmarks.simulation.system import Setting
from specwire import SamplingParams, clock
from specwire.engine.emulated import EmulatedModel
from specwire.proposals.estimate.rates import best_length
from specwire.v1 import generation_pb2

TARGET_MS, DRAFT_MS = 30.0, 3.0


def setting(alpha: float, num_draft_tokens: str = "4", **fields: Any) -> Setting:
    defaults: dict[str, Any] = {
        "model": EmulatedModel(alpha=alpha, runner_up=0.55, vocab_size=WIDE_VOCAB),
        "target": StepCost(base_ms=TARGET_MS),
        "draft": StepCost(base_ms=DRAFT_MS),
        "num_outcomes": "0",
    }
    return Setting(num_draft_tokens=num_draft_tokens, **defaults | fields)


def one_stream(world: Setting, num_tokens: int = 900) -> generation_pb2.Completion:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, seed=0)
    return workload.completions(world, [[params]])[0][0]


def expected_length(alpha: float, num_draft_tokens: int) -> float:
    """Leviathan et al. 2023, equation 1."""
    return (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)


def test_time_passes_only_where_something_waits_for_it() -> None:
    async def main() -> list[float]:
        loop, moments = asyncio.get_running_loop(), []

        async def wait(seconds: float) -> None:
            await asyncio.sleep(seconds)
            moments.append(loop.time())

        await asyncio.gather(wait(3600.0), wait(0.5), wait(7.25))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        assert clock.stopwatch_ns() == 3660 * 10**9
        return moments

    assert virtual_time.run(main()) == [0.5, 7.25, 3600.0]
    assert clock.stopwatch_ns() != 3660 * 10**9, "the machine's clock is back"


def test_what_would_wait_for_ever_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="wait"):
        virtual_time.run(asyncio.Event().wait())


@pytest.mark.slow
def test_a_simulation_repeats_itself() -> None:
    world = setting(0.7, "auto", num_outcomes="auto", link=Link(rtt_ms=20, jitter_ms=4), overheads=LEAN)
    params = [SamplingParams(max_tokens=100, temperature=0, seed=0)] * 4
    first, again = (workload.completions(world, [params]) for _ in range(2))
    assert [done.timing for done in first[0]] == [done.timing for done in again[0]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("alpha", "num_draft_tokens"), [(0.5, 2), (0.7, 4), (0.9, 6)])
def test_rounds_are_those_of_the_closed_form(alpha: float, num_draft_tokens: int) -> None:
    """Tokens a round, and the speed-up of theorem 3.8: no overhead, no distance."""
    done = one_stream(setting(alpha, str(num_draft_tokens)))
    num_rounds = done.speculation.num_rounds
    length = done.usage.completion_tokens / num_rounds
    spread = num_draft_tokens / math.sqrt(num_rounds)  # at most three standard errors of a length
    assert length == pytest.approx(expected_length(alpha, num_draft_tokens), abs=spread)
    round_ms = done.timing.total_ms / num_rounds
    assert round_ms == pytest.approx(num_draft_tokens * DRAFT_MS + TARGET_MS, rel=0.01)


@pytest.mark.slow
def test_the_best_length_is_that_of_the_closed_form() -> None:
    alpha, lengths = 0.7, (1, 4, 9)
    rates = [1e3 / (done := one_stream(setting(alpha, str(n)))).timing.total_ms * 900 for n in lengths]
    tokens = [expected_length(alpha, n) for n in range(11)]
    best = best_length(tokens, [TARGET_MS + n * DRAFT_MS for n in range(11)])
    promised = [expected_length(alpha, n) / (TARGET_MS + n * DRAFT_MS) for n in lengths]
    assert abs(lengths[int(np.argmax(rates))] - best) <= 1
    np.testing.assert_allclose(np.array(rates) / 1e3, promised, rtol=0.06)
    assert done.usage.completion_tokens == 900


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("length", "depth"), [("32", {"max_depth": "4"}), ("4", {})], ids=["trees", "chains"]
)
def test_exact_sampling_and_the_short_cut_come_to_the_same(length: str, depth: dict[str, Any]) -> None:
    """And trees commit more tokens a round than a chain of as many passes."""
    model = EmulatedModel(alpha=0.7, runner_up=0.55)
    found = []
    for exact in (False, True):
        done = one_stream(setting(0.7, length, model=model, exact=exact, num_outcomes="16", **depth), 60)
        found.append((list(done.speculation.acceptance_histogram), done.timing.total_ms))
    assert found[0] == found[1]
    if depth:
        chain = one_stream(setting(0.7, "4", model=model), 60)
        assert sum(found[0][0]) < 0.75 * chain.speculation.num_rounds


def test_trees_are_found_where_they_pay() -> None:
    """Target and draft of the closed forms; the coordinator learns while it generates."""
    free: dict[str, Any] = {"overheads": LEAN, "draft": StepCost(base_ms=2)}
    dear = free | {"target": StepCost(base_ms=2, token_us=1000)}
    for costs, least_gain in ((free, 1.2), (dear, 0.97)):
        chains, trees = (
            one_stream(setting(0.7, "auto", max_depth=depth, **costs), 300) for depth in ("0", "auto")
        )
        assert trees.timing.total_ms < chains.timing.total_ms / least_gain


def test_a_text_that_repeats_itself_is_drafted_from_itself() -> None:
    """Beside a model, at a distance that the text's drafts do not have."""
    model = EmulatedModel(alpha=0.7, runner_up=0.55, vocab_size=16, repeat=60)
    far: dict[str, Any] = {"model": model, "link": Link(rtt_ms=20), "overheads": LEAN, "max_depth": "0"}
    without = one_stream(setting(0.7, "4", **far), 300)
    beside = one_stream(setting(0.7, "4", speculative_config='{"method": "ngram"}', **far), 300)
    by_source = {counts.source: counts.num_accepted_tokens for counts in beside.speculation.by_source}
    assert by_source["ngram"] > 120
    assert beside.timing.total_ms < without.timing.total_ms / 1.5


def test_prepared_outcomes_hide_twenty_milliseconds() -> None:
    far = Link(rtt_ms=20)
    devices: dict[str, Any] = {"link": far, "overheads": LEAN, "draft": StepCost(base_ms=2)}
    lockstep = one_stream(setting(0.8, **devices), 300)
    prepared = one_stream(setting(0.8, num_outcomes="16", **devices), 300)
    assert prepared.speculation.num_prepared > 0.6 * prepared.speculation.num_rounds
    assert prepared.timing.total_ms < lockstep.timing.total_ms / 1.4


@pytest.mark.slow
def test_a_full_target_is_never_slower_for_speculation() -> None:
    """A token costs as much in a batch as by itself: nothing is to be won, and next to nothing is lost."""
    full = {"target": StepCost(base_ms=2, token_us=1000), "overheads": LEAN}
    batches = [[SamplingParams(max_tokens=n, temperature=0, seed=0)] * 64 for n in (100, 200)]  # with a trial
    (_, plain), (_, chosen) = (
        workload.completions(setting(0.7, length, **full), batches) for length in ("0", "auto")
    )
    assert workload.tokens_per_s(chosen) > 0.97 * workload.tokens_per_s(plain)
    rounds = [done.speculation for done in chosen]
    assert sum(each.num_draft_tokens for each in rounds) < 0.3 * sum(each.num_rounds for each in rounds)


@pytest.mark.parametrize("num_passes", [1, 2])
def test_passes_on_one_device_slow_each_other_while_both_run(num_passes: int) -> None:
    """Of 2 and 6 ms: the long one is alone again for its last 4 ms."""

    async def ends_s(device: Device, pass_s: float) -> float:
        await device.run(pass_s)
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        device = Device(slowdown=2.0)
        return await asyncio.gather(*(ends_s(device, pass_s) for pass_s in (0.006, 0.002)[:num_passes]))

    assert virtual_time.run(main()) == pytest.approx([[0.006], [0.008, 0.004]][num_passes - 1])


def test_the_referee_compares_what_is_chosen_with_fixed_lengths() -> None:
    (found,) = controller.explore(controller.SHARED[:1], 30, lambda _: None)
    assert found.best_length in controller.FIXED
    assert 0.5 < found.of_best < 3  # trees are chosen, too
    measured = [bar.measured for bar in controller.bars([found])]
    assert measured == [*[None] * 4, found.of_best, found.of_plain]
    assert f"(γ = {found.best_length})" in controller.details([found])
