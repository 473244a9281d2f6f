"""How requests to draft and verify become messages, and their messages checked answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coordinator.peers.link import Codec
from specwire.errors import SpecwireError
from specwire.rpc.wire import columns
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import verify as verify_wire
from specwire.v1 import draft_pb2, verify_pb2

Answers = Iterator[tuple[int, Any]]


def verify_codec(vocab_size: int, source: str = "") -> Codec:
    """Of a verify service with this vocabulary, in tokens."""

    def decode(message: verify_pb2.VerifyResponse) -> Answers:
        for answer in verify_wire.answers_from_proto(message, vocab_size):
            yield answer.sequence_id, answer
        yield from _errors(message)

    return Codec(verify_wire.request_to_proto, decode, lambda message: False)


def draft_codec(vocab_size: int, source: str = "") -> Codec:
    """Of a draft service.

    Args:
        vocab_size: of the target, in tokens.
        source: of its proposals: the model's name.
    """

    def decode(message: draft_pb2.DraftResponse) -> Answers:
        for answer in draft_wire.answers_from_proto(message, vocab_size, source):
            yield answer.sequence_id, answer
        if message.HasField("prepared"):
            for each in draft_wire.prepared_from_proto(message.prepared, vocab_size, source):
                yield each.sequence_id, each
        yield from _errors(message)

    return Codec(draft_wire.request_to_proto, decode, lambda message: message.HasField("prepared"))


def _errors(message: Any) -> Iterator[tuple[int, SpecwireError]]:
    """Sequences that the service closed, and why."""
    for error in message.errors:
        yield error.sequence_id, columns.error_from_proto(error)
