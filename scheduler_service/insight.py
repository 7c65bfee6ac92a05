"""What others may ask of the scheduler: the state of a request, and figures of the service. It changes nothing."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING

from protos.errors import UnknownRequest
from protos.v1 import gateway_link_pb2 as gateway_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service import translate
from scheduler_service.core import admission, outlook
from scheduler_service.core.core import Core
from scheduler_service.core.lifecycle import State
from scheduler_service.core.policies import policy_name
from scheduler_service.core.types import Effect, Finish, StepDone
from scheduler_service.predictor.port import Status

MOST_LISTED = 256  # live requests and tenants in Stats: what it costs stays bounded
MOST_TENANTS = 1024  # whose refusals are counted

if TYPE_CHECKING:
    from scheduler_service.leader import Leader
    from scheduler_service.workers import WorkerSession


class Insight:
    """Counters of one scheduler process, and the delays of its last commands."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.command_delays_s: deque[float] = deque(maxlen=1024)
        self.refusals: Counter[str] = Counter()  # for want of room or time, by tenant

    def refused(self, tenant: str) -> None:
        self.counts["refused"] += 1
        if tenant in self.refusals or len(self.refusals) < MOST_TENANTS:
            self.refusals[tenant] += 1

    def step_done(self, step: StepDone, effects: Iterable[Effect]) -> None:
        counted = {effect.record.request.id for effect in effects if getattr(effect, "start", None) is not None}
        self.counts["preemptions"] += sum(1 for effect in effects if effect.record.state is State.PAUSED)
        for row in step.rounds:
            if row.id in counted and row.finish is not Finish.ERROR:
                self.counts["tokens"] += row.new
                self.counts["drafts"] += row.drafted > 0
                self.counts["drafted"] += row.drafted
                self.counts["accepted"] += row.accepted

    def stats(self, leader: "Leader", requests: int = 0) -> types_pb.ServerStats:
        """With up to `requests` live requests, at most MOST_LISTED."""
        entries = leader.core.entries.values()
        states = Counter(entry.state for entry in entries)
        levels = Counter(entry.claim.level for entry in entries)
        delays = sorted(self.command_delays_s)
        counts = self.counts
        return types_pb.ServerStats(
            policy=policy_name(leader.core.policy),
            model=leader.model.name if leader.model else "",
            waiting=states[State.WAITING],
            running=states[State.RUNNING],
            paused=states[State.PAUSED],
            queue_lengths=[levels[level] for level in range(1, leader.core.policy.levels + 1)],
            workers=[_worker_status(leader, session) for session in leader.sessions.values()],
            submitted=counts["submitted"],
            finished=counts["finished"],
            cancelled=counts["cancelled"],
            preemptions=counts["preemptions"],
            output_tokens=counts["tokens"],
            num_drafts=counts["drafts"],
            num_draft_tokens=counts["drafted"],
            num_accepted_tokens=counts["accepted"],
            report_to_command_p50_ms=_percentile_ms(delays, 0.50),
            report_to_command_p99_ms=_percentile_ms(delays, 0.99),
            epoch=leader.epoch,
            predictor=_predictor_status(leader.learning.status),
            now=leader.clock(),
            context_tokens=leader.model.context_tokens if leader.model else 0,
            requests=_live(leader, outlook.best(leader.core, min(requests, MOST_LISTED))),
            classes=_classes(leader.core),
            tenants=self._tenants(leader.core),
            refused=counts["refused"],
            expired=counts["expired"],
            backlog_bound_s=admission.backlog_bound_s(leader.core),
        )

    def _tenants(self, core: Core) -> list[types_pb.TenantStatus]:
        tenants: dict[str, types_pb.TenantStatus] = {}
        for entry in core.entries.values():
            name = entry.request.tenant
            status = tenants.get(name) or tenants.setdefault(name, types_pb.TenantStatus(tenant=name))
            status.tokens += entry.request.most_tokens
            if entry.state is State.WAITING:
                status.waiting += 1
            else:
                status.running += 1
        for name, refused in self.refusals.items():
            tenants.setdefault(name, types_pb.TenantStatus(tenant=name)).refused = refused
        return nlargest(MOST_LISTED, tenants.values(), key=lambda one: (one.waiting + one.running, one.refused))


def _classes(core: Core) -> list[types_pb.ClassStatus]:
    waits_s = admission.waits_s(core) if core.workers else {}
    return [
        types_pb.ClassStatus(
            **{"class": int(klass)},
            requests=load.requests,
            tokens=load.tokens,
            backlog_s=waits_s.get(klass, 0.0),
        )
        for klass, load in core.load.by_class.items()
    ]


async def request_status(leader: "Leader", id: str) -> types_pb.RequestStatus:
    """Why am I waiting? Raises UnknownRequest, StoreUnavailable."""
    now = leader.clock()
    if id in leader.core.entries:
        return _live(leader, [id])[0]
    if (stored := await leader.ledger.stored(id)) is None:
        raise UnknownRequest(f"request {id} is unknown, or ended too long ago")
    status = translate.to_status(stored.record, now)
    if stored.ending is not None:
        status.finish_reason = gateway_pb.Ending.FromString(stored.ending).finish_reason
    return status


def _live(leader: "Leader", ids: Sequence[str]) -> list[types_pb.RequestStatus]:
    now, core = leader.clock(), leader.core
    statuses = []
    for id, wait_s in zip(ids, outlook.waits_s(core, ids), strict=True):
        entry = core.entries[id]
        status = translate.to_status(entry.record(), now)
        status.position = outlook.position(core, id)
        status.worker_id = entry.home or ""
        status.predicted_tokens = outlook.predicted_tokens(core, id)
        if leader.sessions:
            status.estimated_start = now + wait_s if entry.started is None else entry.started
            status.estimated_end = now + wait_s + outlook.remaining_s(core, id)
        statuses.append(status)
    return statuses


def _worker_status(leader: "Leader", session: "WorkerSession") -> types_pb.WorkerStatus:
    worker = leader.core.workers[session.worker]
    return types_pb.WorkerStatus(
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
    )


def _predictor_status(status: Status | None) -> types_pb.PredictorStatus:
    if status is None:
        return types_pb.PredictorStatus(status="none")
    return types_pb.PredictorStatus(
        status=status.word, version=status.version, finished=status.finished, trained_on=status.trained_on
    )


def _percentile_ms(ordered_s: Sequence[float], share: float) -> float:
    return 1000 * ordered_s[min(len(ordered_s) - 1, int(share * len(ordered_s)))] if ordered_s else 0.0
