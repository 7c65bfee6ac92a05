"""The wire's messages to the engine's plain data, and back. No decisions."""

import gzip
from collections.abc import Sequence

from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as pb
from protos.v1 import types_pb2
from worker_service.engine.types import CostProfile, Finish, Held, Limits, Logprob, Row, Run, Sampling, Skip
from worker_service.models import LoadedModel
from worker_service.runner import Admission, Command, Report

_FINISH = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: types_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Finish.ERROR: types_pb2.FINISH_REASON_ERROR,
}
_SKIP = {None: pb.SKIP_UNSPECIFIED, Skip.NO_BLOCKS: pb.SKIP_NO_BLOCKS}


def to_command(message: pb.StepCommand) -> Command:
    return Command(
        seq=message.seq,
        seen_step=message.seen_step,
        schedule=[Run(run.request_id, run.draft_len, run.prefill_tokens) for run in message.schedule],
        admit=[_to_admission(admit) for admit in message.admit],
        drop=list(message.drop),
        offload=list(message.offload),
        forget=list(message.forget),
    )


def _to_admission(message: pb.Admit) -> Admission:
    limits = message.limits
    return Admission(
        request_id=message.request_id,
        placement=message.placement,
        tokens=list(message.tokens),
        prompt_len=message.prompt_len,
        sampling=_to_sampling(message.sampling),
        limits=Limits(limits.max_tokens, limits.min_tokens, tuple(limits.stop), limits.ignore_eos),
        tenant=message.tenant,
    )


def _to_sampling(message: common_pb.Sampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token, entry.bias) for entry in message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def of_report(report: Report, epoch: int, session: str) -> pb.StepReport:
    result = report.result
    return pb.StepReport(
        epoch=epoch,
        session=session,
        step=report.step,
        command_seq=report.command_seq,
        rows=[_of_row(row) for row in result.rows],
        free_blocks=result.free_blocks,
        draft_s=result.draft_s,
        verify_s=result.verify_s,
        other_s=report.other_s,
        idle_s=report.idle_s,
        cost=of_cost(report.cost) if report.cost else None,
    )


def _of_row(row: Row) -> pb.Row:
    return pb.Row(
        request_id=row.request_id,
        placement=row.placement,
        start=row.start,
        tokens=row.tokens,
        drafted=row.drafted,
        accepted=row.accepted,
        prefilled=row.prefilled,
        blocks=row.blocks,
        prefill_owed=row.num_uncomputed,
        finish=_FINISH[row.finish],
        skipped=_SKIP[row.skipped],
        error=row.error,
        logprobs=_of_logprobs(row.logprobs) if row.logprobs else None,
    )


def _of_logprobs(logprobs: Sequence[Logprob]) -> common_pb.Logprobs:
    return common_pb.Logprobs(
        tokens=[
            types_pb2.Logprob(
                logprob=own.logprob,
                top_tokens=[token for token, _ in own.top],
                top_logprobs=[value for _, value in own.top],
            )
            for own in logprobs
        ]
    )


def of_held(held: Held) -> pb.Held:
    return pb.Held(
        request_id=held.request_id,
        placement=held.placement,
        output_tokens=held.output_tokens,
        blocks=held.blocks,
        offloaded=held.offloaded,
        prefill_owed=held.num_uncomputed,
    )


def of_cost(cost: CostProfile) -> pb.CostProfile:
    return pb.CostProfile(
        draft_s=cost.draft_s,
        verify_s=cost.verify_s,
        verify_slope_s=cost.verify_slope_s,
        prefill_token_s=cost.prefill_token_s,
        verify_token_s=cost.verify_token_s,
        offload_block_s=cost.offload_block_s,
    )


def of_model(model: LoadedModel, context_tokens: int, vocab_size: int) -> common_pb.ModelInfo:
    """What a gateway needs to turn text into tokens and back. `context_tokens`: what both model and KV memory allow."""
    tokenizer = model.tokenizer
    return common_pb.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        context_tokens=context_tokens,
        vocab_size=vocab_size,
        eos_ids=sorted(model.eos_ids),
        tokenizer_json=gzip.compress(tokenizer.backend_tokenizer.to_str().encode(), mtime=0),
        chat_template=tokenizer.chat_template or "",
        special_tokens={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
        },
    )
