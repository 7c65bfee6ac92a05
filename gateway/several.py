"""What several cells say as what one service does. Nothing is asked here."""

from collections.abc import Iterable, Mapping

from protos.v1 import status_pb2 as pb

_SUMS = (
    "waiting", "running", "paused", "submitted", "finished", "cancelled", "preemptions", "output_tokens", "num_drafts",
    "num_draft_tokens", "num_accepted_tokens", "refused", "expired", "unreadable",
)  # fmt: skip


def together(cells: Mapping[str, pb.StatsResponse]) -> pb.StatsResponse:
    """`cells`: those that answered, by name; of several, also if one alone answered. Counts are added; of times the
    longest counts. Workers are named CELL/WORKER. What each cell has of its own, such as its predictor, is that of the
    first."""
    whole = pb.StatsResponse()
    answers = list(cells.values())
    whole.CopyFrom(answers[0])
    for name in _SUMS:
        setattr(whole, name, sum(getattr(answer, name) for answer in answers))
    whole.model = ", ".join(dict.fromkeys(answer.model for answer in answers if answer.model))
    whole.policy = ", ".join(dict.fromkeys(answer.policy for answer in answers))
    for name in ("epoch", "context_tokens"):
        setattr(whole, name, max(getattr(answer, name) for answer in answers))
    levels = max(len(answer.queue_lengths) for answer in answers)
    whole.queue_lengths[:] = [
        sum(answer.queue_lengths[level] for answer in answers if level < len(answer.queue_lengths))
        for level in range(levels)
    ]
    del whole.workers[:], whole.loading_workers[:]
    for cell, answer in cells.items():
        for worker in answer.workers:
            whole.workers.add().CopyFrom(worker)
            whole.workers[-1].worker_id = f"{cell}/{worker.worker_id}"
        whole.loading_workers.extend(f"{cell}/{name}" for name in answer.loading_workers)
    for answer in answers[1:]:
        _add_priorities(whole, answer)
        _add_tenants(whole, answer)
        for name in ("report_to_command_p50", "report_to_command_p99"):
            if getattr(answer, name).ToNanoseconds() > getattr(whole, name).ToNanoseconds():
                getattr(whole, name).CopyFrom(getattr(answer, name))
    return whole


def in_cell(cell: str, requests: Iterable[pb.RequestStatus]) -> None:
    """Their workers are named as those of `together`."""
    for one in requests:
        one.worker_id = one.worker_id and f"{cell}/{one.worker_id}"


def _add_priorities(whole: pb.StatsResponse, answer: pb.StatsResponse) -> None:
    known = {one.priority: one for one in whole.priorities}
    for one in answer.priorities:
        if (own := known.get(one.priority)) is None:
            whole.priorities.add().CopyFrom(one)
            continue
        own.requests += one.requests
        own.tokens += one.tokens
        if one.backlog.ToNanoseconds() > own.backlog.ToNanoseconds():
            own.backlog.CopyFrom(one.backlog)


def _add_tenants(whole: pb.StatsResponse, answer: pb.StatsResponse) -> None:
    known = {one.tenant: one for one in whole.tenants}
    for one in answer.tenants:
        if (own := known.get(one.tenant)) is None:
            whole.tenants.add().CopyFrom(one)
            continue
        for name in ("waiting", "running", "tokens", "refused"):
            setattr(own, name, getattr(own, name) + getattr(one, name))
