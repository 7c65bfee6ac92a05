"""A worker's report, checked and turned into the core's data: no worker may break what belongs to others. One pass does
both, since it is done for every row of every report. No state lives here, and no decision."""

from typing import TypeAlias

from protos.errors import BadInput
from protos.link.v1 import worker_link_pb2 as pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.core.events import Round, StepDone
from scheduler_service.core.probed import Reading, reading
from scheduler_service.core.types import Finish
from scheduler_service.store.rounds import MAX_TOKENS

MAX_DRAFT = 255  # drafts of a round: a stored round counts them in one byte
MAX_PREFILLED = 1 << 24  # tokens that a row computes: its tenant is charged for them
MIN_S, MAX_S = -1.0, 1e9  # a time of a report, by rounding; all that they come to: a worker may be idle for months
_FINISH = {  # what a worker may say
    types_pb.FINISH_REASON_UNSPECIFIED: None,
    types_pb.FINISH_REASON_STOP: Finish.STOP,
    types_pb.FINISH_REASON_LENGTH: Finish.LENGTH,
    types_pb.FINISH_REASON_ERROR: Finish.ERROR,
}

# A row as the core gets it; its tokens, which the core does not see; and as it was sent.
Output: TypeAlias = tuple[Round, list[int], pb.Row]


def read(worker: str, report: pb.StepReport) -> tuple[StepDone, dict[str, Output]]:
    """The event for the core, and each row by its request's id. Raises BadInput."""
    rounds: list[Round] = []
    outputs: dict[str, Output] = {}
    for row in report.rows:
        tokens = row.tokens[:]
        drafted, accepted, skipped = row.drafted, row.accepted, row.skipped != pb.SKIP_UNSPECIFIED
        prefilled = row.prefilled
        each = _each(row) if row.tokens_per_round else ()
        if skipped and tokens and not each:
            raise BadInput("rows", "a request that was skipped has tokens of no round")
        if not each:
            _check(len(tokens), drafted, accepted)
        if prefilled > MAX_PREFILLED:
            raise BadInput("rows", f"{prefilled} tokens computed, of at most {MAX_PREFILLED}")
        if row.finish not in _FINISH:
            raise BadInput("rows", f"finish {row.finish} is not a worker's to say")
        if row.HasField("logprobs"):
            _check_logprobs(row)
        round = Round(  # arguments with names cost three times as much
            row.request_id,
            row.placement,
            row.start,
            len(tokens),
            drafted,
            accepted,
            prefilled,
            row.prefill_owed,
            row.blocks,
            _FINISH[row.finish],
            skipped,
            each,
            row.skipped == pb.SKIP_DEFERRED,
            _reading(row, len(tokens)) if row.HasField("remaining") else None,
        )
        rounds.append(round)
        outputs[round.id] = round, tokens, row
    if len(outputs) < len(rounds):
        raise BadInput("rows", "a request has more than one")
    of_rounds_s = report.draft_s, report.verify_s, report.other_s, report.wait_s
    duration_s = report.last_round_s or sum(of_rounds_s)  # a request's first round began so long ago
    times = *of_rounds_s, report.idle_s, report.last_round_s
    if duration_s < 0 or min(times) < MIN_S or not sum(map(abs, times)) <= MAX_S:
        raise BadInput("last_round_s", f"a round that takes {duration_s} s, or another time that cannot be")
    step = StepDone(worker, tuple(rounds), report.free_blocks, duration_s, report.command_seq, report.partial)
    return step, outputs


def _check_logprobs(row: pb.Row) -> None:
    told = row.logprobs
    if len(told.tokens) not in (0, len(row.tokens)):
        raise BadInput("rows", f"{len(told.tokens)} log-probabilities of {len(row.tokens)} tokens")
    if (told.prompt or told.embedding) and (row.start or not row.tokens):
        raise BadInput("rows", "a row without the first token of the output tells of the prompt")


def _each(row: pb.Row) -> tuple[tuple[int, int, int], ...]:
    """Tokens, drafted and accepted of every round of a row."""
    of_each = row.tokens_per_round, row.drafted_per_round, row.accepted_per_round
    sums = len(row.tokens), row.drafted, row.accepted
    if len(set(map(len, of_each))) > 1 or tuple(map(sum, of_each)) != sums:
        raise BadInput("rows", "tokens, drafted or accepted are not the sums of their rounds")
    each = tuple(zip(*of_each, strict=True))
    for round in each:
        _check(*round)
    return each


def _reading(row: pb.Row, tokens: int) -> Reading:
    told = row.remaining
    if not row.start < told.after <= row.start + tokens:
        raise BadInput("rows", f"a probe's reading after {told.after} tokens is of no round of the row")
    try:
        return reading(told.after, told.chances)
    except ValueError as error:
        raise BadInput("rows", str(error)) from None


def _check(tokens: int, drafted: int, accepted: int) -> None:
    """One round."""
    if not accepted <= drafted <= MAX_DRAFT:
        raise BadInput("rows", f"{accepted} accepted of {drafted} drafted, of at most {MAX_DRAFT}")
    if tokens > MAX_TOKENS:
        raise BadInput("rows", f"{tokens} tokens in a round, of at most {MAX_TOKENS}")
