"""Messages between driver and ranks. Pickled: they are processes of one service and trust each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from specwire.config.services import ModelServiceConfig
from specwire.engine.batch import Batch
from specwire.engine.device import Decide, DraftQuery, DraftShape


class RankLocation(NamedTuple):
    """Where a rank runs: the machine's address in the cluster, Ray's name for the machine, and the device as
    the machine's own tools name it (`cpu`, `cuda:3`)."""

    host: str
    node_id: str
    pid: int
    device: str


class Assignment(NamedTuple):
    """The role of a rank, and how it reaches the others: the driver's store, with the prefix of this group's
    keys, and the driver's connections to this group, with their token."""

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
    """The properties of the loaded model, as of `ModelRunner`; the same on every rank.

    Attributes:
        description: see `loading.describe`.
        num_pages: of the KV cache.
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
        decide: called by rank 0.
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
