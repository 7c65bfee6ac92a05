"""Messages as version 0.1.0 stored them are read as they were written, and the same submission has the same bytes."""

from protos.idempotence import content, same
from protos.link.v1.common_pb2 import Limits, LogitBias, Logprobs, Sampling
from protos.link.v1.gateway_link_pb2 import Ending, Submit
from protos.v1 import types_pb2
from protos.v1.types_pb2 import Choice, Logprob, Structure

SUBMIT = bytes.fromhex(
    "0a03722d31120601ac02f0a2041a300d0000003f150000803e1807208080808080808080402d0000c03f35000000bf3d0000403f4207080915"
    "000000c04803220b082810021a03656e6420012a0461636d6530034002481e"
)
ENDING = bytes.fromhex("0805110000000000002940180220092a026e6f")
LOGPROBS = bytes.fromhex("0a130d000000bf120204051a08000000bf0000c0bf0a050d000000c0")

SUBMITTED = Submit(
    request_id="r-1",
    prompt=[1, 300, 70000],
    sampling=Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=2**62,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=[LogitBias(token=9, bias=-2)],
        logprobs=3,
    ),
    limits=Limits(max_tokens=40, min_tokens=2, stop=["end"], ignore_eos=True),
    tenant="acme",
    priority=types_pb2.PRIORITY_BATCH,
    on_disconnect=types_pb2.ON_DISCONNECT_DETACH,
    predicted_tokens=30,
    timeout_s=2.5,
)


def test_a_stored_submission_is_read() -> None:
    stored = Submit.FromString(SUBMIT)
    stored.timeout_s = SUBMITTED.timeout_s  # is not stored
    assert stored == SUBMITTED


def test_a_submission_is_stored_in_the_same_bytes() -> None:
    assert content(SUBMITTED) == SUBMIT


def test_the_same_submission_sent_again_is_known() -> None:
    again = Submit()
    again.CopyFrom(SUBMITTED)
    again.input_digest = b"digest"  # of a newer gateway
    assert same(Submit.FromString(SUBMIT), again)
    again.prompt.append(5)
    assert not same(Submit.FromString(SUBMIT), again)


def test_a_structure_is_stored_and_one_stored_without_has_none() -> None:
    assert not Submit.FromString(SUBMIT).sampling.HasField("structure")
    submit = Submit(sampling=Sampling(structure=Structure(choice=Choice(texts=["yes", "no"]))))
    assert Submit.FromString(content(submit)) == submit
    assert not same(submit, Submit(sampling=Sampling()))


def test_a_stored_ending_is_read() -> None:
    finish = types_pb2.FINISH_REASON_ERROR
    assert Ending.FromString(ENDING) == Ending(
        finish_reason=finish, queue_ms=12.5, preemptions=2, rounds=9, message="no"
    )


def test_stored_log_probabilities_are_read() -> None:
    first = Logprob(logprob=-0.5, top_tokens=[4, 5], top_logprobs=[-0.5, -1.5])
    assert Logprobs.FromString(LOGPROBS) == Logprobs(tokens=[first, Logprob(logprob=-2)])
