"""Messages between driver and ranks. Pickled: they are processes of one service and trust each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from specwire.config.services import ModelServiceConfig
from specwire.engine.batch import Batch
from specwire.engine.device import Decide, DraftQuery, DraftShape


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
    """The role of a rank, and how it reaches the others.

    Attributes:
        host, port: of the driver's store.
        key: prefix of this group in the store.
        control_port, token: of the driver's connections to this group.
    """

    rank: int
    num_ranks: int
    host: str
    port: int
    key: str
    control_port: int
    token: bytes
    config: ModelServiceConfig
    source: str
    dtype: str


class Loaded(NamedTuple):
    """The properties of the loaded model; the same on every rank.

    Attributes:
        description: see `loading.describe`.
        context_len: maximum tokens of one sequence; None when the model names no limit.
        vocab_size: width of the logits.
        num_embeddings: number of token ids that the model can read.
        num_pages: of the KV cache.
        draft_shape: of what drafts on the ranks, if anything does.
        warning: for the service's log; empty for none.
    """

    description: dict[str, Any]
    context_len: int | None
    vocab_size: int
    num_embeddings: int
    num_pages: int
    draft_shape: DraftShape | None
    warning: str = ""


class StepCommand(NamedTuple):
    """One step: a pass of the model, or of what drafts beside it.

    Attributes:
        number: counts the steps of a group, so that a missed one is detected.
        batch: None of passes of a draft that appends nothing.
        question: None when no logits are wanted.
        decide: called by rank 0 with question and logits.
        query: of a pass of the draft.
    """

    number: int
    batch: Batch | None
    question: Any
    decide: Decide
    query: DraftQuery | None = None


class StepAnswer(NamedTuple):
    """The result of a step; `problem` is the traceback if `decide` failed, which leaves the group intact."""

    number: int
    answer: Any
    problem: str = ""
