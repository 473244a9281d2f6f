"""What a target proposes after its own verdicts with a draft model in its own process.

    draft's cache  ├── committed ──┤├─ nodes that were expanded ─┤     the next round keeps the accepted path

As a draft service, less the network: the same passes, trees, noise, and supports. Each sequence of the
target has one of the draft, which follows it. It holds pages of a pool of its own, and gives them up when
others need them: it is filled again from the committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from specwire import clock
from specwire.config.services import VerifyConfig
from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_SUPPORT, num_in_common
from specwire.engine import chosen
from specwire.engine.batch import Feed
from specwire.engine.boot import ModelService
from specwire.engine.drawn import Drawn
from specwire.engine.jobs import MAX_CATCH_UP_TOKENS, TokenSequence
from specwire.errors import ResourceExhaustedError
from specwire.rule.choices import Kind
from specwire.rule.columns import Rows
from verify_service.grown import Growing, GrownDrafts, GrowthQuestion, Node, choose

if TYPE_CHECKING:  # it loads transformers
    from specwire.engine.model.runner import ModelRunner


class ModelDrafts(GrownDrafts):
    """See `GrownDrafts`. Chains of one kind are decoded on the device, where it can.

    Args:
        runner: of the draft model.
        config: of the target.
        vocab_size: of the target.
        may_be_tree: whether the target verifies trees.
    """

    draws = True

    def __init__(
        self, runner: ModelRunner, config: VerifyConfig, vocab_size: int, *, may_be_tree: bool
    ) -> None:
        super().__init__(runner, may_be_tree=may_be_tree)
        self._config, self._vocab_size = config, vocab_size
        self.support_len = min(vocab_size, MAX_SUPPORT)
        self._followers: dict[TokenSequence, TokenSequence] = {}

    @classmethod
    def load(cls, config: VerifyConfig, service: ModelService) -> Self:
        """What `--draft-model` names."""
        runner: Any = service.runner
        may_be_tree = service.info.trees and not runner.drafting.pool.keeps_states
        return cls(runner.drafting, config, service.info.vocab_size, may_be_tree=may_be_tree)

    def grow(self, growing: list[Growing]) -> None:
        """See `GrownDrafts`; nothing for sequences near the end of the draft's context."""
        for closed in [each for each in self._followers if each.closed]:
            self._followers.pop(closed).cache.release()
        longest = self._runner.context_len
        fitting = [
            each for each in growing if not longest or len(each.committed) + each.growth.max_depth <= longest
        ]
        if self._runner.vocab_size < self._vocab_size:  # a token that the draft lacks fails the pass of all
            fitting = [each for each in fitting if max(each.committed) < self._runner.vocab_size]
        for each in fitting:
            self._follow(each)
        caught_up = self._caught_up(fitting)
        # A token alone is chosen as fast by the host.
        chains = [each for each in caught_up if each.num_ranked == 1 and each.growth.max_depth > 1]
        kinds = {each: chosen.kind_of(each.sequence.encoded) for each in chains}
        for kind in {*kinds.values()} if self._runner.can_decode else ():
            alike = [each for each in chains if kinds[each] == kind]
            if kind is not None and self._decoded(kind, alike):
                caught_up = [each for each in caught_up if each not in alike]
        num_before = self.num_passes
        super().grow(caught_up)
        if self._runner.can_decode:
            self.num_hosted = self.num_passes - num_before

    def _decoded(self, kind: Kind, growing: list[Growing]) -> bool:
        """Draft chains of one kind on the device; whether it could."""
        num_steps = max(each.growth.max_depth for each in growing)
        bases = [len(each.committed) for each in growing]
        if self._runner.context_len and max(bases) + num_steps > self._runner.context_len:
            return False
        followers = [self._followers[each.sequence] for each in growing]
        lengths, caches = [own.cache.length for own in followers], [own.cache for own in followers]
        width = min(self._vocab_size, self._runner.vocab_size)
        logits = self._logits_after([Node(each, -1) for each in growing])[:, :width]
        rows = Rows([each.sequence.encoded for each in growing], [1] * len(growing), bases, bases)
        steps = chosen.decoded(self._runner, kind, caches, rows, num_steps, logits)
        if not steps:
            for cache, length in zip(caches, lengths, strict=True):
                cache.truncate(length)
            return False
        self.num_passes += num_steps
        self.num_nodes += num_steps * len(growing)
        for row, (each, own) in enumerate(zip(growing, followers, strict=True)):
            for node, found in enumerate(steps[: each.growth.max_depth], -1):
                if node < each.growth.num_nodes:  # no finite score ends a chain
                    each.add(node, found, row)
            own.tokens += each.growth.token_ids[:-1]
            own.cache.truncate(min(own.cache.length, len(own.tokens)))
        return True

    def chosen_after(self, nodes: Sequence[Node], question: GrowthQuestion) -> list[Drawn]:
        return choose(question, self._logits_after(nodes))

    def _logits_after(self, nodes: Sequence[Node]) -> Tensor:
        """Float32 [num_nodes, the target's vocabulary]; -inf for ids that the draft does not have."""
        feeds = [
            self._feed(of, [node for _, node in own]) for of, own in groupby(nodes, key=attrgetter("of"))
        ]
        logits = self._forward(feeds)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size]

    def _follow(self, growing: Growing) -> None:
        """The draft's sequence becomes the committed tokens; it keeps what it has computed of them."""
        sequence, committed = growing.sequence, growing.committed
        own = self._followers.get(sequence)
        if own is None:
            cache = self._runner.new_sequence()
            cache.root = sequence.cache.root
            own = TokenSequence(sequence.params, sequence.prompt_len, cache, sequence.order)
            self._followers[sequence] = own
        chain = own.chain
        num_known = max(0, min(len(chain), len(committed)) - MAX_NUM_DRAFT_TOKENS)  # but for what was drafted
        if chain[:num_known] != committed[:num_known]:
            num_known = 0
        num_known += num_in_common(chain[num_known:], committed[num_known:])
        own.rebase(num_known, committed[num_known:])
        if not own.cache.length and self._config.prefix_sharing:
            own.cache.reuse_prefix(committed, len(committed) - 1)

    def _caught_up(self, growing: Sequence[Growing]) -> list[Growing]:
        """Compute what long beginnings the draft lacks, so much in a step as running streams may wait for;
        returns the sequences that lack no more than a round leaves."""
        lacking = {each: self._followers[each.sequence] for each in growing}
        behind = [own for own in lacking.values() if len(own.tokens) - own.cache.length > MAX_CATCH_UP_TOKENS]
        is_alone = len(behind) == len(growing)
        room = self._config.max_num_tokens if is_alone else self._config.max_prefill_tokens
        feeds = []
        for own in behind:
            if token_ids := own.tokens[own.cache.length : -1][:room]:
                feeds.append(Feed(own.cache, token_ids, 0))
                room -= len(token_ids)
        if feeds:
            started_ns = clock.stopwatch_ns()
            self._forward(feeds)
            self.prefill_ns = clock.stopwatch_ns() - started_ns
        for own in lacking.values() if self._config.prefix_sharing else ():
            if own.cache.has_unnamed_page:
                own.cache.remember(own.chain)
        return [
            each for each, own in lacking.items() if len(own.tokens) - own.cache.length <= MAX_CATCH_UP_TOKENS
        ]

    def _feed(self, growing: Growing, nodes: list[int]) -> Feed:
        """The next tokens of the draft's sequence: what the outcome added, or nodes."""
        own, growth = self._followers[growing.sequence], growing.growth
        if nodes == [-1]:
            return Feed(own.cache, own.tokens[own.cache.length :], 1)
        token_ids = [growth.token_ids[node] for node in nodes]
        own.tokens += token_ids
        growing.run(nodes)
        own.tree = growing.fed
        return Feed(own.cache, token_ids, len(nodes), own.tree)

    def _forward(self, feeds: Sequence[Feed]) -> Tensor:
        """One pass; memory that it lacks is taken from sequences that are not in it."""
        runner: ModelRunner = self._runner
        try:
            return runner.forward(feeds)
        except ResourceExhaustedError:
            needed = {id(feed.cache) for feed in feeds}
            for own in self._followers.values():
                if id(own.cache) not in needed:
                    own.cache.truncate(0)
            return runner.forward(feeds)
