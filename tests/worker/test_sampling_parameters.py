"""Bias, penalties and log-probabilities: as the textbook has them at every position, drafted or not."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from tests.worker.harness import CLEAR, Driver, Tiny
from tests.worker.test_exactness import TEXTS
from worker_service.engine.drafting.drafter import Ask, Drafter, NoDrafter
from worker_service.engine.sampling import weights
from worker_service.engine.types import Finish, Limits, Run, Sampling

TOKENS = 32
LIMITS = Limits(max_tokens=TOKENS, ignore_eos=True)
CHANGED = [
    Sampling(repetition_penalty=1.4),
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=-0.4),
    Sampling(logit_bias=((70, 6.0), (71, -100.0))),
    Sampling(repetition_penalty=0.8, presence_penalty=0.7, frequency_penalty=0.6, logit_bias=((5, 2.5),)),
]


class Knowing(NoDrafter):
    """Drafts what is known to come; one token in seven is wrong."""

    def __init__(self, texts: Iterable[list[int]]) -> None:
        self._texts = list(texts)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._after(list(ask.tokens))[: ask.draft_len] for ask in asks]

    def _after(self, tokens: list[int]) -> list[int]:
        n = len(tokens)
        rest = next(text[n:] for text in self._texts if text[:n] == tokens)
        return [token if (n + i) % 7 else token + 1 for i, token in enumerate(rest)]


def run(tiny: Tiny, sampling: Sampling, drafter: Drafter) -> Driver:
    driver = Driver(tiny.engine(drafter=drafter))
    for text in TEXTS[:4]:
        driver.admit(text, tiny.prompt(text), LIMITS, sampling)
    driver.finish_all(draft_len=lambda n: n % 7)
    return driver


def run_with_drafts(tiny: Tiny, sampling: Sampling) -> tuple[Driver, Driver]:
    """Without, and with drafts most of which are accepted if all is well."""
    plain = run(tiny, sampling, NoDrafter())
    drafted = run(tiny, sampling, Knowing([*tiny.prompt(text), *plain.outputs[text]] for text in TEXTS[:4]))
    assert sum(row.accepted for row in drafted.rows) > 2 * TOKENS
    assert any(row.accepted < row.drafted for row in drafted.rows)
    return plain, drafted


def textbook_choice(tiny: Tiny, own: Sampling, prompt: list[int], output: list[int]) -> tuple[int, float]:
    """The best token after `output`, penalties and bias written plainly, and how much better it is than the next."""
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([[*prompt, *output]])).logits[0, -1].tolist()
    for token, value in own.logit_bias:
        logits[token] += value
    for token in {*prompt, *output}:
        logits[token] *= 1 / own.repetition_penalty if logits[token] > 0 else own.repetition_penalty
    for token in set(output):
        logits[token] -= own.presence_penalty + own.frequency_penalty * output.count(token)
    second, best = sorted(logits)[-2:]
    return logits.index(best), best - second


@pytest.mark.parametrize("own", CHANGED, ids=str)
def test_penalties_and_bias_are_those_of_the_textbook(tiny: Tiny, own: Sampling) -> None:
    driver = run(tiny, own, NoDrafter())
    for text in TEXTS[:4]:
        prompt, output = tiny.prompt(text), driver.outputs[text]
        for i, token in enumerate(output):
            best, lead = textbook_choice(tiny, own, prompt, output[:i])
            assert token == best or lead < CLEAR
    assert driver.outputs != run(tiny, Sampling(), NoDrafter()).outputs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("own", CHANGED, ids=str)
def test_penalties_see_drafts_as_if_they_had_been_emitted(tiny: Tiny, own: Sampling, temperature: float) -> None:
    plain, drafted = run_with_drafts(tiny, replace(own, temperature=temperature, seed=5))
    assert drafted.outputs == plain.outputs


@pytest.mark.parametrize("shape", [{}, {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3}], ids=str)
def test_logprobs_are_the_models_own_whatever_was_drawn_from(tiny: Tiny, shape: dict[str, float]) -> None:
    _, driver = run_with_drafts(tiny, Sampling(**shape, logprobs=3))  # type: ignore[arg-type]
    for text in TEXTS[:4]:
        rows = [row for row in driver.rows if row.request_id == text]
        assert all(len(row.logprobs) == len(row.tokens) for row in rows)
        reported = [logprob for row in rows for logprob in row.logprobs]
        prompt, output = tiny.prompt(text), driver.outputs[text]
        with torch.inference_mode():
            expected = tiny.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for row, token, found in zip(expected, output, reported, strict=True):
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert [value for _, value in found.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
            assert [float(row[i]) for i, _ in found.top] == pytest.approx([value for _, value in found.top], abs=1e-3)


@pytest.mark.parametrize(("asked", "each"), [(None, []), (0, [0])])
def test_alternatives_and_logprobs_come_only_where_they_are_asked_for(
    tiny: Tiny, asked: int | None, each: list[int]
) -> None:
    driver = run(tiny, Sampling(logprobs=asked), NoDrafter())
    assert sorted({len(logprob.top) for row in driver.rows for logprob in row.logprobs}) == each


def test_a_bias_of_a_token_that_is_none_fails_its_request_alone(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    driver.admit("bad", tiny.prompt("dog"), LIMITS, Sampling(logit_bias=((99_999, 1.0),)))
    driver.admit("good", tiny.prompt("dog"), LIMITS)
    rows = {row.request_id: row for row in driver.step([Run("bad", 0, 9), Run("good", 0, 9)])}
    assert rows["bad"].finish is Finish.ERROR
    assert "logit_bias: 99999" in rows["bad"].error
    assert rows["good"].tokens


@pytest.mark.parametrize(
    "own",
    [
        Sampling(temperature=1.0, repetition_penalty=1e-45),
        Sampling(temperature=1.0, logit_bias=((3, float("nan")),)),
        Sampling(temperature=1.0, top_p=0.5, logit_bias=((3, float("nan")),)),
        Sampling(logit_bias=((3, float("nan")),)),
        Sampling(temperature=1.0, frequency_penalty=-1e38),
    ],
    ids=str,
)
def test_logits_that_are_no_distribution_end_their_request_and_no_other(tiny: Tiny, own: Sampling) -> None:
    driver = Driver(tiny.engine())
    driver.admit("strange", tiny.prompt(TEXTS[0]), LIMITS, own)
    driver.admit("other", tiny.prompt(TEXTS[0]), LIMITS)
    driver.finish_all()
    assert driver.finished == {"strange": Finish.ERROR, "other": Finish.LENGTH}
    assert [row.error for row in driver.rows if row.error] == [
        "logits: not finite with structure, min_tokens, bias and penalties, or by the model itself"
    ]
    driver.forget_all()


@pytest.mark.parametrize("top_p", [0.0, 1e-45, 0.5])
def test_a_nucleus_of_equal_tokens_holds_all_of_them(top_p: float) -> None:
    own = Sampling(temperature=1.0, top_p=top_p)
    assert weights(torch.zeros(7), own).tolist() == [1.0] * 7
