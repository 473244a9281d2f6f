"""`specwire drafts`: kinds of drafts, what each needs and has brought on a server, and ways to draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from specwire.cli.terminal import aligned
from specwire.client.client import Client
from specwire.config.client import ClientConfig
from specwire.config.own_methods import DRAFT_MODEL, OWN_METHODS
from specwire.config.speculative import ABOVE, BEAMS, COUNTS, KSEQ, METHODS, MODEL
from specwire.core import ModelInfo
from specwire.v1 import generation_pb2

_MODEL_NEEDS = "a draft service: --draft DIR; learns with --draft-learn"
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


class _Kind(NamedTuple):
    """A kind of drafts; its totals are those of `source`."""

    name: str
    needs: str
    is_there: bool
    source: str


def _kinds(target: ModelInfo, draft: ModelInfo | None) -> list[_Kind]:
    inner, service = (draft.inner, draft.name) if draft else ("", "")
    is_in_target = target.own_source == DRAFT_MODEL
    own_tokens = draft is not None and not draft.target_tokenizer_fingerprint
    has_chains = draft is not None and draft.trees and own_tokens and target.trees
    in_target = DRAFT_MODEL if is_in_target else ""
    needs = "a draft service with an encoder-decoder, as the target: --draft DIR"
    chains = 'a draft service; its counts are the model\'s: "selection": "kseq"'
    hierarchy = f"a draft service with a drafter of its own: --draft 'ngram{ABOVE}DIR'"
    kinds = [
        _Kind(
            MODEL,
            needs if target.has_encoder else _MODEL_NEEDS,
            draft is not None or is_in_target,
            in_target if inner or draft is None else service,
        ),
        _Kind(KSEQ, chains, has_chains, KSEQ),
        _Kind(f"INNER{ABOVE}{MODEL}", hierarchy, inner != "", service if inner else ""),
        _Kind(BEAMS, "a draft service: num_beams of a request", draft is not None, BEAMS),
    ]
    for source, method in OWN_METHODS.items():
        needs = "a target without an encoder" if target.has_encoder else method.needs
        kinds.append(_Kind(source, needs, target.own_source == source, source))
    for name in METHODS:
        kinds.append(_Kind(name, "nothing, or a text file" if name in COUNTS else "nothing", True, name))
    return kinds


def _lines(
    target: ModelInfo, draft: ModelInfo | None, totals: Mapping[str, generation_pb2.SourceTotals]
) -> list[tuple[str, ...]]:
    """Rows of each kind, and of draft models that were there before; totals are by source."""
    kinds = _kinds(target, draft)
    others = sorted(totals.keys() - {kind.source for kind in kinds})
    kinds += [_Kind(name, _MODEL_NEEDS, False, name) for name in others]
    return [_line(kind, totals.get(kind.source)) for kind in kinds]


def _line(kind: _Kind, brought: generation_pb2.SourceTotals | None) -> tuple[str, ...]:
    row = (kind.name, "yes" if kind.is_there else "no", kind.needs)
    if kind.name == KSEQ:
        return (*row, "", "", "", "")
    if brought is None:
        return (*row, "0", "", "", "")
    share = brought.num_accepted_tokens / max(1, brought.num_draft_tokens)
    tokens = 1 + brought.num_accepted_tokens / max(1, brought.num_drafts)
    accepted = f"{brought.num_accepted_tokens} ({share:.0%})"
    return (*row, str(brought.num_drafts), str(brought.num_draft_tokens), accepted, f"{tokens:.2f}")
