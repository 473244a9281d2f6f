"""Live beams, and draft tokens after them, as trees that the target runs in one pass. Pure.

    prompt ── the ── cat ─┬─ sat ── [on]      prefix  the cat     committed by the request
                          └─ ran ── [to]      nodes   sat ran     live beams, then [draft tokens]

Beams whose tree is too large for a pass are in several trees, each below an ancestor of its own; a beam alone
is a prefix without nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specwire.config.speculative import BEAMS
from specwire.core import Proposal
from specwire.rule.beam_search import Beam


class BeamTree:
    """Beams below a common ancestor.

    Attributes:
        prefix: the ancestor, whose tokens are committed.
        beams: the live ones, in the order of their scores.
        nodes: what the target runs after the prefix, parents before children.
        num_live_nodes: of these, those that lead to live beams; draft tokens follow.
        drafted: these, by what they follow and their token.
    """

    def __init__(self, beams: Sequence[Beam]) -> None:
        self.beams = list(beams)
        self.prefix = _ancestor(self.beams)
        self.nodes = _below(self.prefix, self.beams)
        self.num_live_nodes = len(self.nodes)
        self.drafted: dict[tuple[Beam, int], Beam] = {}

    def add(self, beam: Beam, proposal: Proposal, room: int) -> None:
        """Draft tokens after a live beam, up to `room` nodes of this tree, all together."""
        made: list[Beam] = []
        for node, token_id in enumerate(proposal.token_ids[: max(0, room - len(self.nodes))]):
            place = proposal.parent(node)
            parent = made[place] if place >= 0 else beam
            child = self.drafted.get((parent, token_id))
            if child is None:
                child = self.drafted[parent, token_id] = Beam(parent, token_id)
                self.nodes.append(child)
            made.append(child)


def proposal_of(nodes: Sequence[Beam], base_len: int) -> Proposal:
    """Nodes as draft tokens after so many tokens; without parents if they are a chain."""
    places: dict[Beam | None, int] = {each: i for i, each in enumerate(nodes)}
    parents = [places.get(each.parent, -1) for each in nodes]
    is_chain = parents == list(range(-1, len(nodes) - 1))
    return Proposal(base_len, [each.token_id for each in nodes], (), BEAMS, () if is_chain else parents)


def packed(beams: Sequence[Beam], most: int) -> list[BeamTree]:
    """Trees of at most so many nodes that have all of these beams; as few as a greedy choice finds."""
    groups: list[list[Beam]] = []
    for beam in beams:
        for group in groups:
            both = [*group, beam]
            ancestor = _ancestor(both)
            is_near = beam.length - ancestor.length <= most
            if is_near and len(_below(ancestor, both, most)) <= most:
                group.append(beam)
                break
        else:
            groups.append([beam])
    return [BeamTree(group) for group in groups]


def common_ancestor(one: Beam, other: Beam) -> Beam:
    """The longest text that both begin with, in steps that grow with the logarithm of their lengths."""
    if one.length < other.length:
        one, other = other, one
    while one.length > other.length:
        one = one.jump if one.jump.length >= other.length else _parent(one)
    while one is not other:  # of one length: so are their jumps
        if one.jump is other.jump:
            one, other = _parent(one), _parent(other)
        else:
            one, other = one.jump, other.jump
    return one


def _parent(beam: Beam) -> Beam:
    assert beam.parent is not None
    return beam.parent


def _ancestor(beams: Iterable[Beam]) -> Beam:
    first, *others = beams
    for other in others:
        first = common_ancestor(first, other)
    return first


def _below(prefix: Beam, beams: Sequence[Beam], most: int | None = None) -> list[Beam]:
    """The nodes between an ancestor and these beams, parents before children; may stop once they are over
    `most`."""
    found: dict[Beam, None] = {}
    for beam in beams:
        path = []
        node = beam
        while node is not prefix and node not in found:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        found.update(dict.fromkeys(reversed(path)))
        if most is not None and len(found) > most:
            break
    return list(found)
