"""What the batching loop works on: sequences, and jobs on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from specwire import clock
from specwire.core import SamplingParams, check_token_ids
from specwire.engine.cache import prefix
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.grammars.matcher import GrammarMatcher, LazyMasks
from specwire.errors import (
    ContextLengthError,
    InvalidRequestError,
    PrefixMismatchError,
    RequestCancelledError,
)
from specwire.proposals.tree import TokenTree, follow
from specwire.rule.columns import Encoded, Row

MAX_CATCH_UP_TOKENS = 8
"""A round leaves one or two tokens that the cache lacks; a draft that was skipped leaves a few more."""


@dataclass(eq=False)
class TokenSequence:
    """One open sequence: the tokens known so far and the cache that covers a prefix of them.

    `order` counts sequences as they are opened: the higher, the younger.

    tokens  ├── committed ──────────────┤├─ draft ─┤
    cache   ├── computed ──────────┤                     cache.length <= len(tokens)

    Attributes:
        tree: set while the last tokens, as many as it has nodes, are a tree.
        is_fork: it belongs to the stream of another sequence.
        grammar: what its output must match; forks share it.
        answered_ns: when its last job ended; 0 before the first one.
        turnaround_ns: time from there to the arrival of the next job, as last measured.
    """

    params: SamplingParams
    prompt_len: int
    cache: SequenceCache
    order: int
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree | None = None
    is_fork: bool = False
    closed: bool = False
    grammar: GrammarMatcher | None = None
    answered_ns: int = 0
    turnaround_ns: int = 0

    @property
    def seed(self) -> int:
        """Streams without one are refused when they open."""
        assert self.params.seed is not None
        return self.params.seed

    @cached_property
    def encoded(self) -> Encoded:
        return Encoded.of(self.params, self.seed)

    def masks(
        self, tokens: Sequence[int], draft_token_ids: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> LazyMasks | None:
        """Of the grammar, after these tokens and after each draft token; None without a grammar."""
        if self.grammar is None:
            return None
        return LazyMasks(self.grammar, list(tokens[self.prompt_len :]), draft_token_ids, parents)

    def row(self, history: Sequence[int], position: int, base_len: int) -> Row:
        """How the token after a history is sampled; see `Row`."""
        masks = self.masks(history)
        return Row(self.params, self.prompt_len, history, position, self.seed, base_len, masks)

    @property
    def chain(self) -> list[int]:
        """The tokens before the tree, each of which follows the one before it; all of them without a tree."""
        return self.tokens if self.tree is None else self.tokens[: self.tree.start]

    def rebase(self, base_len: int, token_ids: Sequence[int]) -> None:
        """Roll back to `base_len` tokens, then commit `token_ids` after them.

        Tokens that it already holds, such as accepted drafts, stay in its cache, and those of a tree move
        together there; but the last committed token is run again, since its logits are needed for the next
        position.

        Raises:
            PrefixMismatchError: fewer than `base_len` tokens are held before a tree; nothing is changed.
            InvalidRequestError: not even the input of the encoder is whole; nothing is changed.
        """
        tokens, tree, num_kept = self.tokens, self.tree, base_len
        num_read = self.cache.encoder_len
        if num_read and base_len + len(token_ids) <= num_read:
            problem = f"the encoder's input has {num_read} tokens, and others follow"
            raise InvalidRequestError("token_ids", base_len + len(token_ids), problem)
        chain_len = len(tokens) if tree is None else tree.start
        if base_len > chain_len:
            raise PrefixMismatchError(base_len, chain_len)
        for ours, theirs in zip(tokens[base_len:chain_len], token_ids, strict=False):
            if ours != theirs:
                break
            num_kept += 1
        if tree is not None and num_kept == chain_len:
            num_kept += self._keep_path(tree, token_ids[num_kept - base_len :])
        tokens[base_len:] = token_ids
        self.tree = None
        num_kept = min(num_kept, len(tokens) - 1)
        self.cache.committed_len = len(tokens)
        if num_kept < self.cache.length:
            self.cache.truncate(num_kept)
        if num_read and not self.cache.length:
            self.cache.root = prefix.root(self.params.cache_salt, tokens[:num_read])

    def _keep_path(self, tree: TokenTree, following: Sequence[int]) -> int:
        """Drop the computed nodes that are not on the path along these tokens; returns how many there are."""
        num_computed = self.cache.length - tree.start
        path = follow(self.tokens[tree.start :], tree.parents, following)
        kept = [node for node in path if node < num_computed]
        if num_computed > 0:
            self.cache.keep(tree.start, kept)
        return len(kept)

    def fork_from(self, parent: TokenSequence, length: int) -> None:
        """Become the first `length` tokens of `parent`, and share its pages.

        Raises:
            PrefixMismatchError: it holds fewer before its tree.
            RequestCancelledError: it was closed.
        """
        if parent.closed:
            raise RequestCancelledError("the sequence to fork was closed")
        chain = parent.chain
        if length > len(chain):
            raise PrefixMismatchError(length, len(chain))
        self.cache.release()
        self.cache = parent.cache.fork()
        self.cache.truncate(min(self.cache.length, length))
        self.tokens, self.tree, self.encoded = chain[:length], None, parent.encoded

    def replace_with_fork(self, fork: TokenSequence) -> None:
        """Take over a fork's tokens, tree and cache; the fork is closed."""
        self.cache.release()
        self.tokens, self.tree, self.cache = fork.tokens, fork.tree, fork.cache
        fork.closed = True


@dataclass(eq=False)
class Job:
    """One or more forward passes on a sequence, then a result; subclasses define both.

    What to run next are the sequence's tokens that the cache lacks, so a sequence that lost its cache to
    another one simply runs its tokens again.

    Attributes:
        num_rows: how many of the last tokens to run need logits.
        num_cached_tokens: tokens that were found in the prefix cache instead of being run.
        batch_size: sequences in its last forward pass, its own included.
        num_losses: forward passes during which the device was lost.
        parent: the sequence that this job's new sequence is forked from, if any.
        worth: priority of a background job; higher runs earlier.
        goes_on: a background job that its sequence most likely needs: it runs beside those that are waited
            for, however long it makes their step.
        result: set by the service's decider once it has seen enough logits.
        following: a background job that begins when this one has its result; set along with it.
        tag: what its caller knows it by.
        num_translated: token ids below it may be committed though the model lacks them, since the job
            translates them.
    """

    sequence: TokenSequence
    base_len: int
    token_ids: Sequence[int]
    num_rows: int = 0
    # Looked up late: a simulation replaces the clock.
    arrived_ns: int = field(default_factory=lambda: clock.stopwatch_ns())  # noqa: PLW0108
    started_ns: int = 0
    finished_ns: int = 0
    forward_ns: int = 0
    num_cached_tokens: int = 0
    batch_size: int = 0
    num_losses: int = 0
    parent: TokenSequence | None = None
    worth: float = 0.0
    goes_on: bool = False
    result: Any = None
    following: Job | None = None
    tag: Any = None
    num_translated: int = 0

    def start(self) -> None:
        """Called once on the engine thread: roll the sequence back and commit."""
        if self.parent is not None:
            self.sequence.fork_from(self.parent, self.base_len)
        self.sequence.rebase(self.base_len, self.token_ids)

    @property
    def committed_len(self) -> int:
        """Length of the sequence without drafts."""
        return self.base_len + len(self.token_ids)

    @property
    def pending(self) -> list[int]:
        return self.sequence.tokens[self.sequence.cache.length :]

    @property
    def is_prefill(self) -> bool:
        """Whether many tokens must be run without logits: a prompt, or a cache that was lost."""
        sequence = self.sequence
        return len(sequence.tokens) - sequence.cache.length - self.num_rows > MAX_CATCH_UP_TOKENS

    @property
    def done(self) -> bool:
        """Whether there is a result, or no logits are wanted and the cache is filled."""
        return self.result is not None or (self.num_rows == 0 and not self.pending)


def check_job(job: Job, extra_len: int, *, context_len: int, vocab_size: int) -> None:
    """Refuse a job that cannot be run; `extra_len` tokens may be added to the sequence while it runs.

    Raises:
        InvalidRequestError: no committed token, or one outside the vocabulary.
        ContextLengthError: the sequence would outgrow `context_len`.
    """
    length = job.base_len + len(job.token_ids)
    if job.base_len < 0:
        raise InvalidRequestError("base_len", job.base_len, "must be at least 0")
    if length == 0:
        raise InvalidRequestError("token_ids", [], "at least one token must be committed")
    if length + extra_len > context_len:
        raise ContextLengthError("token_ids", length + extra_len, f"over the context of {context_len}")
    check_token_ids("token_ids", job.token_ids, vocab_size)
