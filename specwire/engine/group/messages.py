"""What driver and ranks tell each other. Pickled: they are processes of one service, and trust each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from specwire.config.services import ModelServiceConfig
from specwire.engine.batch import Batch
from specwire.engine.device import Decide


class RankLocation(NamedTuple):
    """Where a rank runs.

    Attributes:
        host: the machine's address in the cluster.
        node_id: Ray's name for the machine.
        device: as the machine's own tools name it (`cpu`, `cuda:3`).
    """

    host: str
    node_id: str
    pid: int
    device: str


class Assignment(NamedTuple):
    """What a rank is to be, and where it meets the others.

    Attributes:
        host, port: of the driver's store.
        key: of this group in it.
        line_port, token: of the driver's lines to this group.
    """

    rank: int
    num_ranks: int
    host: str
    port: int
    key: str
    line_port: int
    token: bytes
    config: ModelServiceConfig
    source: str
    dtype: str


class Loaded(NamedTuple):
    """What the driver must know of the model; the same on every rank.

    Attributes:
        description: see `loading.describe`.
        context_len: most tokens of one sequence; None when the model does not say.
        vocab_size: width of the logits.
        num_embeddings: tokens that the model can read.
        num_pages: of the KV cache.
        warning: what the service's log should say; empty for nothing.
    """

    description: dict[str, Any]
    context_len: int | None
    vocab_size: int
    num_embeddings: int
    num_pages: int
    warning: str = ""


class Order(NamedTuple):
    """One step.

    Attributes:
        number: counts the steps of a group, so that nobody can miss one.
        question: None when no logits are wanted.
        decide: what rank 0 does with question and logits.
    """

    number: int
    batch: Batch
    question: Any
    decide: Decide


class StepAnswer(NamedTuple):
    """What came of a step; `problem` is the traceback when `decide` failed, no fault of the group."""

    number: int
    answer: Any
    problem: str = ""
