"""A generation's client as it is waited for: writes in order, pauses, and their end. No network."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import pytest

from coordinator.credit import Credit
from coordinator.reader import CreditReader, Writes
from specwire.errors import InvalidRequestError, StreamIdleError

IDLE_S = 0.05


class Wire:
    """Notes what is written, each time after a moment, and nothing while it is held."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.held = asyncio.Event()
        self.held.set()

    async def write(self, message: int) -> None:
        await asyncio.sleep(0)
        await self.held.wait()
        self.written.append(message)


def reader(wire: Wire, window: int = 0, idle_timeout_s: float = 60.0) -> CreditReader:
    return CreditReader(wire.write, Credit(window, 5), idle_timeout_s, Writes())


async def generate(client: CreditReader, num_messages: int, error: BaseException | None = None) -> None:
    """Send 0, 1 and so on, as a generation that waits for its next round or ends with an error."""
    async with client:
        for number in range(num_messages):
            client.send(partial(int, number))
        if error is not None:
            raise error
        await client.ready()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def is_held(client: CreditReader) -> bool:
    """Whether no round may start now."""
    waiting = asyncio.create_task(client.ready())
    await settle()
    return waiting.cancel()


@pytest.mark.parametrize(
    "error", [None, InvalidRequestError("credit_tokens", 0, "must be at least 1"), asyncio.CancelledError()]
)
async def test_whatever_ends_the_generation_all_of_it_is_written(error: BaseException | None) -> None:
    wire = Wire()
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        await generate(reader(wire), 3, error)
    assert wire.written == [0, 1, 2]


async def test_what_comes_while_a_message_is_written_is_one_message_then() -> None:
    """So a slow client costs no round, until 8 of them wait."""
    wire = Wire()
    client = reader(wire)
    rounds: list[int] = []

    def take() -> int:
        taken = len(rounds)
        rounds.clear()
        return taken

    def finish_round() -> None:
        rounds.append(1)
        client.send(take)

    wire.held.clear()
    finish_round()
    await settle()
    for _ in range(7):
        finish_round()
    assert client.is_ready
    finish_round()
    assert not client.is_ready
    assert await is_held(client)
    wire.held.set()
    await client.ready()
    await settle()
    assert wire.written == [1, 8]


async def test_what_the_next_round_asks_for_leaves_before_a_message_is_made() -> None:
    """A link sends in the turn after a request is put: `Writes` are a turn later, of all streams together."""
    wire, writes = Wire(), Writes()
    events: list[str] = []
    loop = asyncio.get_running_loop()
    for name in ("one", "other"):
        client = CreditReader(wire.write, Credit(0, 5), 60.0, writes)
        client.send(partial(events.append, f"message of {name}"))
        loop.call_soon(events.append, f"request of {name}")
    await settle()
    assert events == ["request of one", "request of other", "message of one", "message of other"]


async def test_an_error_ends_a_pause_and_every_later_round() -> None:
    client = reader(Wire(), window=64)
    client.credit.spend(num_emitted=60, num_sent=60)
    waiting = asyncio.create_task(client.ready())
    await asyncio.sleep(0)
    client.fail(ZeroDivisionError())
    for attempt in (waiting, client.ready()):
        with pytest.raises(ZeroDivisionError):
            await attempt


async def test_a_write_that_fails_ends_the_generation() -> None:
    async def write(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await generate(CreditReader(write, Credit(0, 5), 60.0, Writes()), 2)


@pytest.mark.parametrize("window", [0, 64], ids=["writes", "acknowledgements"])
async def test_nothing_taken_for_long_ends_it_and_drops_what_is_unwritten(window: int) -> None:
    wire = Wire()
    if not window:
        wire.held.clear()

    client = reader(wire, window, IDLE_S)
    client.credit.spend(num_emitted=60, num_sent=60)
    with pytest.raises(StreamIdleError, match=r"no token was taken for 0\.05 s"):
        await generate(client, 2)
    wire.held.set()
    await settle()
    assert wire.written == ([] if not window else [0, 1])


async def test_a_message_that_is_never_written_ends_it_at_the_end_too() -> None:
    wire = Wire()
    wire.held.clear()
    with pytest.raises(StreamIdleError):
        async with reader(wire, idle_timeout_s=IDLE_S) as client:
            client.send(partial(int, 0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_tokens", [1, 2])
async def test_a_client_that_takes_a_token_now_and_then_is_not_idle(num_tokens: int) -> None:
    """It acknowledges for three times as long as it may take nothing, too little for another round."""
    client = reader(Wire(), window=64, idle_timeout_s=4 * IDLE_S)
    client.credit.spend(num_emitted=80, num_sent=80)
    waiting = asyncio.create_task(client.ready())
    for _ in range(4):
        await asyncio.sleep(3 * IDLE_S)
        assert not waiting.done()
        client.acknowledge(num_tokens)
    waiting.cancel()


async def test_the_time_of_a_round_does_not_count() -> None:
    client = reader(Wire(), window=64, idle_timeout_s=IDLE_S)
    client.send(partial(int, 0))
    await asyncio.sleep(2 * IDLE_S)
    await client.ready()


@pytest.mark.parametrize("has_each", [False, True])
async def test_rounds_that_come_together_are_one_message_or_one_each(*, has_each: bool) -> None:
    wire, rounds = Wire(), list[int]()

    def take() -> int:
        taken = len(rounds)
        rounds.clear()
        return taken

    async with CreditReader(wire.write, Credit(0, 5), 60.0, Writes(), has_each=has_each) as client:
        for number in range(6):
            if not client.is_ready:
                await client.ready()
            rounds.append(number)
            client.send(take)
    assert wire.written == ([1] * 6 if has_each else [6])
