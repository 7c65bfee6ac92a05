"""Turns messages of the links into the core's data, and back. No state lives here, and no decision."""

from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.times import duration, timestamp
from protos.v1 import status_pb2 as status_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.core import backlog
from scheduler_service.core.beliefs import Expected
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.events import Held, WorkerUp
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Finish, Plan, Record, Request, RequestClass

_STATE = {
    State.WAITING: status_pb.REQUEST_STATE_WAITING,
    State.RUNNING: status_pb.REQUEST_STATE_RUNNING,
    State.PAUSED: status_pb.REQUEST_STATE_PAUSED,
}
_REASON = {
    State.CANCELLED: types_pb.FINISH_REASON_CANCELLED,
    State.EXPIRED: types_pb.FINISH_REASON_DEADLINE,
    State.FAILED: types_pb.FINISH_REASON_ERROR,
}


def to_request(submit: gateway_pb.Submit, arrival: float, expected: Expected | None = None) -> Request:
    """`arrival`: seconds since the Unix epoch."""
    return Request(
        id=submit.request_id,
        arrival=arrival,
        prompt_tokens=len(submit.prompt),
        max_tokens=max(1, submit.limits.max_tokens),
        klass=RequestClass(submit.priority or RequestClass.DEFAULT),
        deadline=arrival + submit.timeout_s if submit.HasField("timeout_s") else None,
        predicted_tokens=submit.predicted_tokens if submit.HasField("predicted_tokens") else None,
        expected=expected,
        tenant=submit.tenant,
    )


def to_worker_up(hello: worker_pb.Hello) -> WorkerUp:
    return WorkerUp(
        worker=hello.worker_id,
        slots=hello.slots,
        blocks=hello.blocks,
        block_tokens=hello.block_tokens,
        max_draft=hello.max_draft,
        cost=to_cost(hello.cost),
        held=tuple(
            Held(held.request_id, held.placement, held.blocks, held.offloaded, held.prefill_owed) for held in hello.held
        ),
        host_blocks=hello.host_blocks,
    )


def to_cost(cost: worker_pb.CostProfile) -> CostProfile:
    return CostProfile(
        draft_s=cost.draft_s,
        verify_s=cost.verify_s,
        verify_slope_s=cost.verify_slope_s,
        prefill_token_s=cost.prefill_token_s,
        verify_token_s=cost.verify_token_s,
        offload_block_s=cost.offload_block_s,
        supply_s=cost.supply_s,
        delay_s=cost.delay_s,
        hit=min(max(cost.hit, 0.0), 1.0),
        chains=cost.chains,
        fallback=cost.fallback,
        wait_s=cost.wait_s,
    )


def list_runs(plan: Plan, command: worker_pb.StepCommand) -> None:
    """Put the plan's schedule into the command."""
    add = command.schedule.add
    for run in plan.schedule:
        listed = add()  # one by one: arguments of `add` cost more
        listed.request_id = run.id
        listed.draft_len = run.draft_len
        listed.prefill_tokens = run.prefill_tokens
        if run.here:
            listed.here = True
        if run.yields:
            listed.yields = True


def to_ending(record: Record, finish: Finish | None, now: float, message: str = "") -> gateway_pb.Ending:
    reason = (
        types_pb.FINISH_REASON_STOP
        if finish is Finish.STOP
        else types_pb.FINISH_REASON_LENGTH
        if finish is Finish.LENGTH
        else _REASON[record.state]
    )
    return gateway_pb.Ending(
        finish_reason=reason,
        queue_ms=queue_time_s(record, now) * 1000,
        preemptions=record.preemptions,
        rounds=record.acceptance.rounds,
        message=message,
    )


def queue_time_s(record: Record, now: float) -> float:
    """From submission to its first round; until `now` if it never ran."""
    return max(0.0, (now if record.started is None else record.started) - record.request.arrival)


def to_status(record: Record, now: float) -> status_pb.RequestStatus:
    """All but what the queue alone knows: position, worker, estimates."""
    return status_pb.RequestStatus(
        request_id=record.request.id,
        tenant=record.request.tenant,
        state=_STATE.get(record.state, status_pb.REQUEST_STATE_FINISHED),
        queue_level=record.level,
        perceptible=record.perceptible,
        submit_time=timestamp(record.request.arrival),
        preemptions=record.preemptions,
        prompt_tokens=record.request.prompt_tokens,
        output_tokens=record.emitted,
        max_tokens=record.request.max_tokens,
        rounds=record.acceptance.rounds,
        acceptance_rate=record.acceptance.mean,
        queue_time=duration(queue_time_s(record, now)),
        priority=types_pb.Priority.ValueType(record.request.klass),
    )


def to_load(fleet: Fleet) -> gateway_pb.Load:
    """How long a new request would wait, for gateways that choose between cells."""
    free = sum(max(worker.vacancy, 0) for worker in fleet.workers.values() if not worker.draining)
    waits_s = backlog.waits_s(fleet).values()
    return gateway_pb.Load(backlog_s=waits_s, request_s=backlog.request_s(fleet), free_slots=free)
