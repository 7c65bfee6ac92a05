"""What others may ask of the scheduler: the state of a request, and figures of the service. It changes nothing."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf

from google.protobuf.duration_pb2 import Duration

from protos.bounds import MOST_LISTED, PAGE
from protos.errors import BadInput, UnknownRequest
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.times import duration, timestamp
from protos.v1 import inference_pb2 as inference_pb
from protos.v1 import status_pb2 as status_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service import comparing, translate
from scheduler_service.core import backlog, outlook, reasons
from scheduler_service.core.entry import Entry
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import State
from scheduler_service.core.policies import policy_name
from scheduler_service.core.reasons import Reason
from scheduler_service.leader import Leader
from scheduler_service.pace import LOOKED_UP
from scheduler_service.predictor.port import Status
from scheduler_service.session import WorkerSession

COUNTED_AT_ONCE = 256  # live requests, until other tasks run
MOST_ROUNDS = 64  # of a request's last ones, that are told
LISTED_AT_ONCE = 8  # the same; where each of these stands has to be looked up among all others

_PAGE_TOKEN = re.compile("[0-9]{0,9}")
_WAIT_REASON = {
    Reason.NO_WORKER: status_pb.WAIT_REASON_NO_WORKER,
    Reason.SUSPECT: status_pb.WAIT_REASON_SUSPECT,
    Reason.TURN: status_pb.WAIT_REASON_TURN,
    Reason.BEGUN: status_pb.WAIT_REASON_BEGUN,
    Reason.CLASS: status_pb.WAIT_REASON_PRIORITY,
    Reason.TENANT: status_pb.WAIT_REASON_TENANT,
    Reason.OVERDUE: status_pb.WAIT_REASON_OVERDUE,
    Reason.LEVEL: status_pb.WAIT_REASON_LEVEL,
    Reason.PERCEPTIBLE: status_pb.WAIT_REASON_PERCEPTIBLE,
    Reason.CLAIM: status_pb.WAIT_REASON_CLAIM,
    Reason.ARRIVAL: status_pb.WAIT_REASON_ARRIVAL,
}


@dataclass(slots=True)
class _Tally:
    """How many live requests there are of each kind."""

    states: Counter[State] = field(default_factory=Counter)
    levels: Counter[int] = field(default_factory=Counter)
    tenants: dict[str, status_pb.TenantStatus] = field(default_factory=dict)

    def count(self, entry: Entry) -> None:
        self.states[entry.state] += 1
        self.levels[entry.claim.level] += 1
        status = self.tenant(entry.request.tenant)
        status.tokens += entry.request.most_tokens
        if entry.state is State.WAITING:
            status.waiting += 1
        else:
            status.running += 1

    def tenant(self, name: str) -> status_pb.TenantStatus:
        return self.tenants.get(name) or self.tenants.setdefault(name, status_pb.TenantStatus(tenant=name))

    def largest(self, refused: Mapping[str, int]) -> list[status_pb.TenantStatus]:
        """The tenants with the most requests. `refused`: how many requests, by tenant."""
        for name, number in refused.items():
            self.tenant(name).refused = number
        return nlargest(MOST_LISTED, self.tenants.values(), key=lambda one: (one.waiting + one.running, one.refused))


async def stats(leader: Leader) -> status_pb.StatsResponse:
    """Figures of the service. Other tasks run while live requests are counted, and may change some of them."""
    fleet, tally = leader.core.fleet, _Tally()
    for number, entry in enumerate(list(fleet.entries.values()), 1):
        tally.count(entry)
        if number % COUNTED_AT_ONCE == 0:
            await leader.turns.pause(LOOKED_UP)
    delays = sorted(leader.counters.command_delays_s)
    counts, model = leader.counters, leader.workers.model
    bound_s = backlog.bound_s(fleet)
    return status_pb.StatsResponse(
        policy=policy_name(fleet.policy),
        model=model.name if model else "",
        waiting=tally.states[State.WAITING],
        running=tally.states[State.RUNNING],
        paused=tally.states[State.PAUSED],
        queue_lengths=[tally.levels[level] for level in range(1, fleet.policy.levels + 1)],
        workers=[_worker_status(leader, session) for session in leader.sessions.values()],
        submitted=counts.submitted,
        finished=counts.ended[State.FINISHED],
        cancelled=counts.ended[State.CANCELLED],
        preemptions=counts.preemptions,
        output_tokens=counts.tokens,
        num_drafts=counts.drafts,
        num_draft_tokens=counts.drafted,
        num_accepted_tokens=counts.accepted,
        report_to_command_p50=_percentile(delays, 0.50),
        report_to_command_p99=_percentile(delays, 0.99),
        epoch=leader.epoch,
        predictor=_predictor_status(leader.learning.status),
        read_time=timestamp(leader.clock()),
        context_tokens=model.context_tokens if model else 0,
        priorities=_priorities(fleet),
        tenants=tally.largest(counts.refused_by_tenant),
        refused=counts.refused,
        unreadable=leader.recovery.set_aside.count,
        loading_workers=leader.workers.loading,
        expired=counts.ended[State.EXPIRED],
        backlog_bound=duration(bound_s) if bound_s < inf else None,
    )


def _priorities(fleet: Fleet) -> list[status_pb.PriorityStatus]:
    waits_s = backlog.waits_s(fleet) if fleet.workers else {}
    return [
        status_pb.PriorityStatus(
            priority=types_pb.Priority.ValueType(klass),
            requests=load.requests,
            tokens=load.tokens,
            backlog=duration(waits_s.get(klass, 0.0)),
        )
        for klass, load in fleet.load.by_class.items()
    ]


async def live_status(leader: Leader, id: str) -> status_pb.RequestStatus | None:
    """Why am I waiting? None if the request is not live."""
    fleet = leader.core.fleet
    if id not in fleet.entries:
        return None
    place = outlook.position(fleet, id)
    await leader.turns.pause(LOOKED_UP)  # its place, and how long it waits, are each looked up among all requests
    if id not in fleet.entries:
        return None
    return _live_status(leader, id, place, *outlook.waits_behind_s(fleet, [_ahead(fleet, id, place)]))


async def stored_status(leader: Leader, id: str) -> status_pb.RequestStatus:
    """Of a request that is not live. Raises UnknownRequest, Lost, StoreUnavailable."""
    if (stored := await leader.ledger.stored(id)) is None:
        raise UnknownRequest(f"request {id} is unknown, or ended too long ago")
    status = translate.to_status(stored.record, leader.clock())
    if stored.ending is not None:
        ending = gateway_pb.Ending.FromString(stored.ending)
        status.finish_reason = ending.finish_reason
        status.queue_time.CopyFrom(duration(ending.queue_ms / 1000))  # also of one that never ran
    return status


async def list_requests(leader: Leader, request: inference_pb.ListRequestsRequest) -> inference_pb.ListRequestsResponse:
    """One page of the live requests; its token says how many requests the pages before it listed. Other tasks run while
    those are passed over, so a page may miss a request that moves. Raises BadInput."""
    if not _PAGE_TOKEN.fullmatch(request.page_token):
        raise BadInput("page_token", "is not the next_page_token of an answer")
    size, skipped = min(request.page_size or PAGE, MOST_LISTED), int(request.page_token or 0)
    page = inference_pb.ListRequestsResponse(read_time=timestamp(leader.clock()))
    ids: list[str] = []
    passed = 0
    for some in outlook.in_order(leader.core.fleet, COUNTED_AT_ONCE):
        ids += some[max(0, skipped - passed) :]
        passed += len(some)
        if len(ids) > size:
            break
        await leader.turns.pause(LOOKED_UP)
    if len(ids) > size:
        page.next_page_token = str(skipped + size)
    await _fill(leader, page, ids[:size], min(request.recent_rounds, MOST_ROUNDS))
    return page


async def _fill(
    leader: Leader, page: inference_pb.ListRequestsResponse, ids: Sequence[str], recent_rounds: int
) -> None:
    """With those of `ids` that are still live. Workers wait for their commands meanwhile: a few are done at once."""
    fleet, places, ahead = leader.core.fleet, dict[str, int](), dict[str, int]()
    for start in range(0, len(ids), LISTED_AT_ONCE):
        await leader.turns.pause(LOOKED_UP)
        for id in ids[start : start + LISTED_AT_ONCE]:
            if id in fleet.entries:
                places[id] = outlook.position(fleet, id)
                ahead[id] = _ahead(fleet, id, places[id])
    await leader.turns.pause(LOOKED_UP)
    waits_s = dict(zip(ahead, outlook.waits_behind_s(fleet, list(ahead.values())), strict=True))
    for start in range(0, len(ids), LISTED_AT_ONCE):
        await leader.turns.pause(LOOKED_UP)
        for id in ids[start : start + LISTED_AT_ONCE]:
            if id in waits_s and id in fleet.entries:
                status = _live_status(leader, id, places[id], waits_s[id])
                _add_rounds(leader, status, recent_rounds)
                page.requests.append(status)


def _ahead(fleet: Fleet, id: str, position: int) -> int:
    """How many others it waits for."""
    return 0 if fleet.entries[id].state is State.RUNNING else position


def _live_status(leader: Leader, id: str, position: int, wait_s: float) -> status_pb.RequestStatus:
    """Of a live request with so many others before it."""
    now, fleet = leader.clock(), leader.core.fleet
    entry = fleet.entries[id]
    status = translate.to_status(entry.record(), now)
    status.position = position
    status.worker_id = entry.home or ""
    status.predicted_tokens = entry.predicted_tokens
    if (why := reasons.why(fleet, id)) is not None:
        reason, passed_by = why
        status.wait_reason = _WAIT_REASON[reason]
        status.passed_by.extend(passed_by)
    if leader.sessions:
        start = now + wait_s if entry.started is None else entry.started
        status.estimated_start_time.CopyFrom(timestamp(start))
        status.estimated_end_time.CopyFrom(timestamp(now + wait_s + outlook.remaining_s(fleet, id)))
    return status


def _add_rounds(leader: Leader, status: status_pb.RequestStatus, count: int) -> None:
    """Its last `count` durable rounds."""
    if count and (tracked := leader.ledger.live.get(status.request_id)) is not None:
        for tokens, drafted, accepted in tracked.log.last(count):
            status.recent_rounds.add(tokens=tokens, drafted=drafted, accepted=accepted)


def compare_policies(leader: Leader) -> inference_pb.ComparePoliciesResponse:
    """The newest comparison there is; a new one is made if it is old."""
    side_by_side = leader.comparing
    side_by_side.ask()
    answer = inference_pb.ComparePoliciesResponse(
        running_policy=side_by_side.running,
        computing=side_by_side.computing,
        ended_requests=side_by_side.ended,
        least_requests=comparing.LEAST,
        problem=side_by_side.problem,
    )
    if (newest := side_by_side.newest) is not None:
        answer.measured_mean_latency.CopyFrom(duration(newest.measured_s))
        answer.requests = newest.requests
        answer.window.CopyFrom(duration(newest.window_s))
        answer.compare_time.CopyFrom(timestamp(newest.at))
        for policy, figures in newest.policies.items():
            answer.policies.add(
                policy=policy,
                mean_latency=duration(figures["mean_e2el_ms"] / 1e3),
                p99_latency=duration(figures["p99_e2el_ms"] / 1e3),
                mean_time_to_first_token=duration(figures["mean_ttft_ms"] / 1e3),
                preemptions=figures["preemptions_per_request"],
            )
    return answer


def _worker_status(leader: Leader, session: WorkerSession) -> status_pb.WorkerStatus:
    worker = leader.core.fleet.workers[session.worker]
    return status_pb.WorkerStatus(
        worker_id=session.worker,
        slots=worker.up.slots,
        running=len(worker.running),
        placed=len(worker.ranking),
        free_blocks=worker.free_blocks,
        blocks=worker.up.blocks,
        rounds=session.rounds,
        idle_share=session.idle_share,
        outside_forward_share=session.outside_forward_share,
        output_tokens=session.tokens,
        draining=worker.draining,
    )


def _predictor_status(status: Status | None) -> status_pb.PredictorStatus:
    if status is None:
        return status_pb.PredictorStatus(state=status_pb.PREDICTOR_STATE_NONE)
    return status_pb.PredictorStatus(
        state=status_pb.PredictorState.Value(f"PREDICTOR_STATE_{status.word.upper()}"),
        version=status.version,
        finished=status.finished,
        trained_on=status.trained_on,
    )


def _percentile(ordered_s: Sequence[float], share: float) -> Duration:
    return duration(ordered_s[min(len(ordered_s) - 1, int(share * len(ordered_s)))] if ordered_s else 0.0)
