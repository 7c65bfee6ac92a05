"""What the page is told at one moment: Stats and ListRequests as one JSON object, times in seconds, with rates. Ids and
figures alone: no text of a request is in there, since prompts and answers are private."""

import json
from collections import deque
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from protos.times import seconds
from protos.v1 import inference_pb2, status_pb2, types_pb2

MOST_REQUESTS = 64  # listed in a frame
ROUNDS = 24  # of each request, the last ones
RATES_OVER_S = 3.0
_COUNTERS = ("submitted", "finished", "cancelled", "preemptions", "output_tokens", "num_draft_tokens")


class Frames:
    """Makes one frame after the other. Rates are over the last RATES_OVER_S; null: not known yet."""

    def __init__(self) -> None:
        self._before: deque[status_pb2.StatsResponse] = deque()  # the oldest first

    def frame(self, stats: status_pb2.StatsResponse, listed: inference_pb2.ListRequestsResponse) -> str:
        """As JSON."""
        now_s = seconds(stats.read_time)
        if self._before and self._before[-1].epoch != stats.epoch:
            self._before.clear()  # another leader counts anew
        while len(self._before) > 1 and seconds(self._before[1].read_time) <= now_s - RATES_OVER_S:
            self._before.popleft()
        then = self._before[0] if self._before else None
        apart_s = now_s - seconds(then.read_time) if then else 0.0
        self._before.append(stats)
        told = {
            "at": now_s,
            "policy": stats.policy,
            "model": stats.model,
            "waiting": stats.waiting,
            "running": stats.running,
            "paused": stats.paused,
            "levels": list(stats.queue_lengths),
            "refused": stats.refused,
            "finished": stats.finished,
            "predictor": status_pb2.PredictorState.Name(stats.predictor.state).removeprefix("PREDICTOR_STATE_").lower(),
            "learned_from": stats.predictor.finished,
            "decision_s": seconds(stats.report_to_command_p50),
            "rates": _rates(stats, then, apart_s),
            "workers": [_worker(one, then, apart_s) for one in stats.workers],
            "loading": list(stats.loading_workers),
            "requests": [_request(one, now_s) for one in listed.requests],
        }
        return json.dumps(told, separators=(",", ":"), allow_nan=False)


def _rates(
    now: status_pb2.StatsResponse, then: status_pb2.StatsResponse | None, apart_s: float
) -> dict[str, float | None]:
    """Each counter's growth per second, and the share of drafted tokens that were accepted."""
    rates = {name: _rate(now, then, name, apart_s) for name in _COUNTERS}
    drafted = now.num_draft_tokens - (then.num_draft_tokens if then else 0)
    accepted = now.num_accepted_tokens - (then.num_accepted_tokens if then else 0)
    if drafted <= 0:  # nothing ran of late: since the scheduler began
        drafted, accepted = now.num_draft_tokens, now.num_accepted_tokens
    return {**rates, "acceptance": round(accepted / drafted, 4) if drafted else None}


def _rate(now: Any, then: Any, counter: str, apart_s: float) -> float | None:
    """None: not known, or counted anew since `then`."""
    more = getattr(now, counter) - getattr(then, counter) if then else -1
    return round(float(more) / apart_s, 3) if more >= 0 and apart_s > 0 else None


def _worker(worker: status_pb2.WorkerStatus, then: status_pb2.StatsResponse | None, apart_s: float) -> dict[str, Any]:
    before = next((one for one in then.workers if one.worker_id == worker.worker_id), None) if then else None
    return {
        "id": worker.worker_id,
        "slots": worker.slots,
        "running": worker.running,
        "placed": worker.placed,
        "kv": round(1 - worker.free_blocks / worker.blocks, 4) if worker.blocks else None,
        "idle": round(worker.idle_share, 4),
        "draining": worker.draining,
        "tokens_per_s": _rate(worker, before, "output_tokens", apart_s),
    }


def _request(status: status_pb2.RequestStatus, now_s: float) -> dict[str, Any]:
    state, priority = status_pb2.RequestState.Name(status.state), types_pb2.Priority.Name(status.priority)
    reason = status_pb2.WaitReason.Name(status.wait_reason)
    return {
        "id": status.request_id,
        "state": state.removeprefix("REQUEST_STATE_").lower(),
        "level": status.queue_level,
        "perceptible": status.perceptible,
        "position": status.position,
        "pauses": status.preemptions,
        "prompt": status.prompt_tokens,
        "output": status.output_tokens,
        "predicted": status.predicted_tokens,
        "most": status.max_tokens,
        "rounds": status.rounds,
        "acceptance": round(status.acceptance_rate, 4) if status.rounds else None,
        "worker": status.worker_id,
        "tenant": status.tenant,
        "priority": priority.removeprefix("PRIORITY_").lower(),
        "age_s": _since(now_s, status.submit_time),
        "queued_s": _length(status.queue_time),
        "starts_in_s": _until(now_s, status.estimated_start_time),
        "ends_in_s": _until(now_s, status.estimated_end_time),
        "reason": reason.removeprefix("WAIT_REASON_").lower() if status.wait_reason else "",
        "passed_by": list(status.passed_by),
        "recent": [[one.tokens, one.drafted, one.accepted] for one in status.recent_rounds],
    }


def _since(now_s: float, then: Timestamp) -> float:
    return round(max(0.0, now_s - seconds(then)), 2)


def _length(given: Duration) -> float:
    return round(seconds(given), 2)


def _until(now_s: float, then: Timestamp) -> float | None:
    """None: that is not known."""
    return round(max(0.0, seconds(then) - now_s), 2) if seconds(then) else None


def comparison(answer: inference_pb2.ComparePoliciesResponse) -> dict[str, Any]:
    """The policies side by side, the best first."""
    ordered = sorted(answer.policies, key=lambda one: seconds(one.mean_latency))
    return {
        "policies": [
            {
                "policy": one.policy,
                "mean_s": _length(one.mean_latency),
                "p99_s": _length(one.p99_latency),
                "first_token_s": _length(one.mean_time_to_first_token),
                "pauses": round(one.preemptions, 2),
            }
            for one in ordered
        ],
        "running": answer.running_policy,
        "measured_s": _length(answer.measured_mean_latency),
        "requests": answer.requests,
        "window_s": _length(answer.window),
        "made_at": seconds(answer.compare_time) if answer.HasField("compare_time") else None,
        "computing": answer.computing,
        "ended": answer.ended_requests,
        "least": answer.least_requests,
        "problem": answer.problem,
    }
