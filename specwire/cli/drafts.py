"""`specwire drafts`: kinds of drafts, what each needs and has brought on a server, and ways to draft."""

from __future__ import annotations

from collections.abc import Mapping

from specwire.cli.terminal import aligned
from specwire.client.client import Client
from specwire.config.client import ClientConfig
from specwire.config.own_methods import DRAFT_MODEL, OWN_METHODS
from specwire.config.speculative import ABOVE, BEAMS, COUNTS, KSEQ, METHODS
from specwire.core import ModelInfo
from specwire.v1 import generation_pb2

_MODEL = "model"
_HIERARCHY = f"INNER{ABOVE}model"
_NEEDS = {
    _MODEL: "a draft service: --draft DIR; learns with --draft-learn",
    KSEQ: 'a draft service; its counts are the model\'s: "selection": "kseq"',
    _HIERARCHY: f"a draft service with a drafter of its own: --draft 'ngram{ABOVE}DIR'",
    BEAMS: "a draft service: num_beams of a request",
    **{source: method.needs for source, method in OWN_METHODS.items()},
    **dict.fromkeys(METHODS, "nothing"),
    **dict.fromkeys(COUNTS, "nothing, or a text file"),
}

_NEEDS_BESIDE_ENCODER = {
    _MODEL: "a draft service with an encoder-decoder, as the target: --draft DIR",
    **dict.fromkeys(OWN_METHODS, "a target without an encoder"),
}


_HEAD = ("draft", "here", "needs", "rounds", "draft tokens", "accepted", "tokens a pass")
_WAY_HEAD = ("tokens/s of a stream", "chosen", "expected", "last measured")


def show(settings: ClientConfig, *, colour: bool) -> str:
    """The table; raises SpecwireError if the server does not answer."""
    with Client(settings.server, timeout_s=settings.timeout_s, **settings.credentials) as client:
        target, draft = client.get_model_info()
        status = client.get_status()
    found = _lines(target, draft, {each.source: each for each in status.by_source})
    parts = [aligned([_HEAD, *found], num_words=3, colour=colour)]
    if status.ways:
        parts.append(aligned([_WAY_HEAD, *_ways(status)], num_words=2, colour=colour))
    if status.why_plain:
        parts.append(f"Decoded plainly: {status.why_plain}.")
    if draft and (now := draft.learning):
        parts.append(
            f"{draft.name} learns: {now.num_steps} steps, {now.num_judged_tokens} tokens of the target "
            f"judged; its own was the same with a probability of {now.first_agreement:.2f} at first, "
            f"{now.agreement:.2f} now; weights replaced {now.num_versions} times, given up "
            f"{now.num_rollbacks} times"
        )
    if status.num_workers > 1:
        parts.append(f"Of the one worker that answered, of {status.num_workers}.")
    return "\n\n".join(parts)


def _ways(status: generation_pb2.GetStatusResponse) -> list[tuple[str, ...]]:
    """Rows of what the coordinator chooses among, the most promising first."""
    found = sorted(status.ways, key=lambda way: -way.expected_tokens_per_s)
    return [
        (
            way.name,
            "now" if way.is_chosen else "",
            f"{way.expected_tokens_per_s:.0f}",
            f"{way.measured_tokens_per_s:.0f}" if way.measured_tokens_per_s else "-",
        )
        for way in found
    ]


def _lines(
    target: ModelInfo, draft: ModelInfo | None, totals: Mapping[str, generation_pb2.SourceTotals]
) -> list[tuple[str, ...]]:
    """Rows of each kind, and of draft models that were there before; totals are by source."""
    own_tokens = draft is not None and not draft.target_tokenizer_fingerprint
    has_chains = draft is not None and draft.trees and own_tokens and target.trees
    inner = draft.inner if draft else ""
    is_in_target = target.own_source == DRAFT_MODEL
    is_there = {
        _MODEL: draft is not None or is_in_target,
        KSEQ: has_chains,
        _HIERARCHY: inner != "",
        BEAMS: draft is not None,
        **{source: target.own_source == source for source in OWN_METHODS},
    }
    sources = {_MODEL: DRAFT_MODEL if is_in_target else "", _HIERARCHY: ""}
    if draft is not None:
        sources[_HIERARCHY if inner else _MODEL] = draft.name
    others = totals.keys() - {sources.get(name, name) for name in _NEEDS}
    given = _NEEDS | _NEEDS_BESIDE_ENCODER if target.has_encoder else _NEEDS
    return [
        *(
            _line(name, needs, totals.get(sources.get(name, name)), is_there=is_there.get(name, True))
            for name, needs in given.items()
        ),
        *(_line(name, _NEEDS[_MODEL], totals[name], is_there=False) for name in sorted(others)),
    ]


def _line(
    name: str, needs: str, brought: generation_pb2.SourceTotals | None, *, is_there: bool
) -> tuple[str, ...]:
    here = "yes" if is_there else "no"
    if name == KSEQ:
        return (name, here, needs, "", "", "", "")
    if brought is None:
        return (name, here, needs, "0", "", "", "")
    share = brought.num_accepted_tokens / max(1, brought.num_draft_tokens)
    tokens = 1 + brought.num_accepted_tokens / max(1, brought.num_drafts)
    accepted = f"{brought.num_accepted_tokens} ({share:.0%})"
    num_drafts, num_draft_tokens = str(brought.num_drafts), str(brought.num_draft_tokens)
    return (name, here, needs, num_drafts, num_draft_tokens, accepted, f"{tokens:.2f}")
