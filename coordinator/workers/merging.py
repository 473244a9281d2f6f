"""The status of a coordinator from those of its workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specwire.v1 import generation_pb2

Status = generation_pb2.GetStatusResponse
ReplicaStatus = generation_pb2.ReplicaStatus
SourceTotals = generation_pb2.SourceTotals


def merged_status(parts: Sequence[Status]) -> Status:
    """Streams and generations are added up; something is unavailable if it is to every worker."""
    return Status(
        num_running=sum(part.num_running for part in parts),
        num_waiting=sum(part.num_waiting for part in parts),
        num_paused=sum(part.num_paused for part in parts),
        num_finished=sum(part.num_finished for part in parts),
        draft_unavailable=_unavailable([part.draft_unavailable for part in parts]),
        why_plain=_unavailable([part.why_plain for part in parts]),
        verify_replicas=_replicas([each for part in parts for each in part.verify_replicas]),
        draft_replicas=_replicas([each for part in parts for each in part.draft_replicas]),
        by_source=_totals([each for part in parts for each in part.by_source]),
        ways=next((part.ways for part in parts if part.ways), []),  # one learns, and the others follow
    )


def _totals(known: Sequence[SourceTotals]) -> list[SourceTotals]:
    """By source, added up."""
    found: dict[str, SourceTotals] = {}
    for each in known:
        total = found.setdefault(each.source, SourceTotals(source=each.source))
        total.num_drafts += each.num_drafts
        total.num_draft_tokens += each.num_draft_tokens
        total.num_accepted_tokens += each.num_accepted_tokens
    return list(found.values())


def _replicas(known: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    """By address, from all that workers know of them."""
    addresses = dict.fromkeys(each.address for each in known)
    return [_replica([each for each in known if each.address == address]) for address in addresses]


def _replica(parts: Sequence[ReplicaStatus]) -> ReplicaStatus:
    """To each worker, the streams of the others are those of other coordinators."""
    num_streams = sum(part.num_streams for part in parts)
    num_in_all = max(part.num_streams + part.num_other_streams for part in parts)
    return ReplicaStatus(
        address=parts[0].address,
        unavailable=_unavailable([part.unavailable for part in parts]),
        num_streams=num_streams,
        num_other_streams=max(0, num_in_all - num_streams),
        num_lost=max(part.num_lost for part in parts),
    )


def _unavailable(reasons: Sequence[str]) -> str:
    """One of the reasons, if there is one everywhere."""
    return reasons[0] if reasons and all(reasons) else ""
