"""What is used of other projects beyond their public interface is still there, and still does the same."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
import transformers
from transformers import core_model_loading

from specwire.engine import private
from specwire.engine.model import recurrent
from specwire.rpc import private as rpc_private
from specwire.v1 import common_pb2
from tests.support.imports import ROOT, sources

GRPC = f"specwire/rpc/private.py uses it of grpcio, which is now {grpc.__version__}"


def test_transformers_sets_weights_by_a_function_that_names_them() -> None:
    parameters = list(inspect.signature(core_model_loading.set_param_for_module).parameters)
    assert parameters[:2] == ["model", "target_name"], (
        "specwire/engine/group/quantised.py uses it of transformers, which is now "
        f"{transformers.__version__}: find what sets a weight that was read, and cut it after that"
    )


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_a_cache_is_handed_over_by_the_name_that_a_version_of_transformers_has(name: str) -> None:
    taken = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in ("hidden_states", name)]

    def forward(**_: object) -> None: ...

    forward.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    assert recurrent.cache_name(forward) == name


def test_torch_has_the_operators_that_pack_weights() -> None:
    missing = [name for name in private.MKLDNN_OPERATORS if not hasattr(torch.ops.mkldnn, name)]
    assert not torch.backends.mkldnn.is_available() or not missing, (
        f"specwire/engine/private.py uses {missing} of torch.ops.mkldnn, which torch {torch.__version__} has "
        "not, so models run unpacked on CPUs, slower; "
        "see torch/_inductor/fx_passes/mkldnn_fusion.py for what the compiler packs weights with now"
    )


@contextlib.asynccontextmanager
async def channel_to(method: str, handler: grpc.RpcMethodHandler) -> AsyncIterator[grpc.aio.Channel]:
    """To a server that has this method of a service `test`."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def test_grpc_wakes_the_loop_through_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `Loop`, many operations that end together cost few turns of it."""
    num_turns = num_ended = 0
    num_calls = 256

    def handle_events(reader: socket.socket, *args: Any) -> None:
        nonlocal num_turns, num_ended
        num_turns += 1
        num_ended += len(reader.recv(4096, socket.MSG_PEEK))
        handle(reader, *args)

    async def echo(request: bytes, _: Any) -> bytes:
        return request

    async def call_all() -> None:
        async with channel_to("Echo", grpc.unary_unary_rpc_method_handler(echo)) as channel:
            method: Any = channel.unary_unary("/test/Echo")
            assert await asyncio.gather(*(method(b"x") for _ in range(num_calls))) == [b"x"] * num_calls

    handle = rpc_private.handle_events
    monkeypatch.setattr(rpc_private, "handle_events", handle_events)
    with asyncio.Runner(loop_factory=rpc_private.Loop) as runner:
        runner.run(asyncio.wait_for(call_all(), 30))
    assert num_turns, f"{GRPC}: its reader has another name or none; measure whether `Loop` is still of use"
    assert num_ended > 4 * num_calls, f"{GRPC}: what wakes its reader has changed; adapt `Loop`"
    assert num_turns < num_ended / 2


async def test_a_call_of_grpc_can_be_written_to_without_changing_its_status() -> None:
    async def answer_once(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield await anext(requests)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough")

    handler = grpc.stream_stream_rpc_method_handler(answer_once)
    async with asyncio.timeout(10), channel_to("Answer", handler) as channel:
        call: Any = channel.stream_stream("/test/Answer")()
        await call.wait_for_connection()
        assert hasattr(getattr(call, "_cython_call", None), "send_serialized_message"), (
            f"{GRPC}: the method that StreamStreamCall.write calls is gone from call._cython_call; find "
            "the one that it calls now, or use `write` if it no longer changes the status of an ended call"
        )
        message = common_pb2.Timings(queue_ns=[7])
        await rpc_private.send(call, message)
        assert await call.read() == message.SerializeToString(), (
            f"{GRPC}: it sends something else; adapt `send`"
        )
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await rpc_private.send(call, message)
        changed = f"{GRPC}: it changes the status of an ended call; adapt `send`"
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, changed


def test_private_apis_are_used_in_their_files_alone() -> None:
    private_use = re.compile(r"torch\.ops\.|_cython_call|\._parameters\b")
    allowed = {ROOT / "specwire/engine/private.py", ROOT / "specwire/rpc/private.py"}
    for folder in ("specwire", "coordinator", "draft_service", "tools", "verify_service"):
        for path in sources(folder):
            found = [] if path in allowed else private_use.findall(path.read_text())
            assert not found, f"{path}: put what needs {found} into one of the private.py files"
