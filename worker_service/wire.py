"""The wire's messages to the engine's plain data, and back. No decisions."""

import gzip
from collections.abc import Sequence
from dataclasses import asdict

from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as pb
from protos.structure import grammar
from protos.v1 import types_pb2
from worker_service.engine.types import Admission, CostProfile, Finish, Held, Limits, Logprob, Row, Run, Sampling, Skip
from worker_service.identity import Described
from worker_service.reporting import Report
from worker_service.runner import Command

_FINISH = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: types_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Finish.ERROR: types_pb2.FINISH_REASON_ERROR,
}
_SKIP = {
    None: pb.SKIP_UNSPECIFIED,
    Skip.NO_BLOCKS: pb.SKIP_NO_BLOCKS,
    Skip.PREEMPTED: pb.SKIP_PREEMPTED,
    Skip.DEFERRED: pb.SKIP_DEFERRED,
}


def to_command(message: pb.StepCommand) -> Command:
    return Command(
        seq=message.seq,
        seen_step=message.seen_step,
        schedule=[
            Run(run.request_id, run.draft_len, run.prefill_tokens, run.here, run.yields) for run in message.schedule
        ],
        admit=[_to_admission(admit) for admit in message.admit],
        drop=list(message.drop),
        offload=list(message.offload),
        forget=list(message.forget),
        report_within_s=message.report_within_s,
    )


def _to_admission(message: pb.Admit) -> Admission:
    limits, form, error = message.limits, "", ""
    if message.sampling.HasField("structure"):
        try:
            form = grammar(message.sampling.structure)
        except ValueError as problem:  # the gateway refuses it; one of a later version may know more
            error = f"structure: {problem}"
    return Admission(
        request_id=message.request_id,
        placement=message.placement,
        tokens=list(message.tokens),
        prompt_len=message.prompt_len,
        sampling=_to_sampling(message.sampling, form),
        limits=Limits(max(1, limits.max_tokens), limits.min_tokens, tuple(limits.stop), limits.ignore_eos),
        salt=message.tenant,
        error=error,
        local_drafts=message.local_drafts,
    )


def _to_sampling(message: common_pb.Sampling, form: str) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token, entry.bias) for entry in message.logit_bias),
        grammar=form,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        embedding=message.embedding,
    )


def of_report(report: Report, epoch: int, session: str) -> pb.StepReport:
    seconds = report.seconds
    return pb.StepReport(
        epoch=epoch,
        session=session,
        step=report.step,
        command_seq=report.command_seq,
        rows=map(_of_rounds, report.rounds),
        free_blocks=report.free_blocks,
        draft_s=seconds.draft,
        verify_s=seconds.verify,
        other_s=seconds.other,
        idle_s=seconds.idle,
        cost=of_cost(report.cost) if report.cost else None,
        partial=report.partial,
        wait_s=seconds.wait,
        last_round_s=report.last_s,
    )


def _of_rounds(rows: Sequence[Row]) -> pb.Row:
    """One request's rounds, in order. If the last row says why it does not run any more, that is no round."""
    last, several = rows[-1], [row for row in rows if row.skipped is None] if len(rows) > 1 else []
    return pb.Row(
        request_id=last.request_id,
        placement=last.placement,
        start=rows[0].start,
        tokens=[token for row in rows for token in row.tokens],
        drafted=sum(row.drafted for row in rows),
        accepted=sum(row.accepted for row in rows),
        prefilled=sum(row.prefilled for row in rows),
        blocks=last.blocks,
        prefill_owed=last.num_uncomputed,
        finish=_FINISH[last.finish],
        skipped=_SKIP[last.skipped],
        error=last.error,
        logprobs=_of_logprobs(rows),
        remaining=_of_remaining(rows),
        tokens_per_round=[len(row.tokens) for row in several],
        drafted_per_round=[row.drafted for row in several],
        accepted_per_round=[row.accepted for row in several],
    )


def _of_remaining(rows: Sequence[Row]) -> pb.Remaining | None:
    """The newest reading of the probe."""
    readings = [row.remaining for row in rows if row.remaining is not None]
    return pb.Remaining(after=readings[-1].after, chances=readings[-1].chances) if readings else None


def _of_logprobs(rows: Sequence[Row]) -> common_pb.Logprobs | None:
    if not any(row.logprobs or row.prompt_logprobs or row.embedding for row in rows):
        return None
    return common_pb.Logprobs(
        tokens=[_of_logprob(each) for row in rows for each in row.logprobs],
        prompt=[_of_logprob(each) for row in rows for each in row.prompt_logprobs],
        embedding=[value for row in rows for value in row.embedding],
    )


def _of_logprob(own: Logprob) -> types_pb2.Logprob:
    return types_pb2.Logprob(
        logprob=own.logprob,
        top_tokens=[token for token, _ in own.top],
        top_logprobs=[value for _, value in own.top],
    )


def of_held(held: Held) -> pb.Held:
    fields = asdict(held)
    return pb.Held(prefill_owed=fields.pop("num_uncomputed"), **fields)


def of_cost(cost: CostProfile) -> pb.CostProfile:
    return pb.CostProfile(**asdict(cost))


def of_model(model: Described, context_tokens: int, vocab_size: int) -> common_pb.ModelInfo:
    """What a gateway needs to turn text into tokens and back. `context_tokens`: what both model and KV memory allow."""
    tokenizer = model.tokenizer
    return common_pb.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        context_tokens=context_tokens,
        vocab_size=vocab_size,
        eos_ids=sorted(model.eos_ids),
        tokenizer_json=gzip.compress(tokenizer.backend_tokenizer.to_str().encode(), mtime=0),
        chat_template=_chat_template(tokenizer.chat_template),
        special_tokens={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
        },
        refused=model.refused,
        caveats=model.caveats,
    )


def _chat_template(given: object) -> str:
    """Of several with names the default one, for no template is told of tools here; empty: there is none."""
    one = given.get("default") if isinstance(given, dict) else given
    return one if isinstance(one, str) else ""
