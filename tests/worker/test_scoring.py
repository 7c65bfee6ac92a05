"""Log-probabilities and embeddings of prompts are exact, however prefill is cut, paused, lost or shared."""

from random import Random

import pytest
import torch

from tests.worker import test_exactness
from tests.worker.harness import Driver, Tiny
from worker_service.engine import planning
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.types import Finish, Limits, Row, Run, Sampling

ASKED = Sampling(prompt_logprobs=2, embedding=True, logprobs=1, logit_bias=((5, 50.0),))
LIMITS = Limits(max_tokens=6, ignore_eos=True)
TEXTS = [" ".join(test_exactness.TEXTS[i : i + 4]) for i in range(7)]


def the_row(driver: Driver, name: str) -> Row:
    """The one row that tells of the prompt: that with the output's first token."""
    (row,) = [row for row in driver.rows if row.request_id == name and (row.prompt_logprobs or row.embedding)]
    assert row.start == 0
    assert row.tokens
    return row


def check(tiny: Tiny, row: Row, prompt: list[int]) -> None:
    """Against the model as transformers runs it, in one pass."""
    with torch.inference_mode():
        output = tiny.model(torch.tensor([prompt]), output_hidden_states=True)
    expected = output.logits[0, :-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert [each.logprob for each in row.prompt_logprobs] == pytest.approx(own, abs=1e-4)
    likeliest = [value for each in row.prompt_logprobs for _, value in each.top]
    assert likeliest == pytest.approx(expected.topk(2).values.flatten().tolist(), abs=1e-4)
    for place, each in enumerate(row.prompt_logprobs):
        for token, value in each.top:
            assert expected[place, token].item() == pytest.approx(value, abs=1e-4)
    last = output.hidden_states[-1][0, -1]
    assert row.embedding == pytest.approx((last / last.norm()).tolist(), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 16, 1024])
def test_the_prompt_is_told_exactly_however_its_prefill_is_cut(tiny: Tiny, chunk: int) -> None:
    driver = Driver(tiny.engine(drafter=NoDrafter()))
    for text in TEXTS[:4]:
        driver.admit(text, tiny.prompt(text), LIMITS, ASKED)
    driver.finish_all(prefill_tokens=chunk)
    for text in TEXTS[:4]:
        check(tiny, the_row(driver, text), tiny.prompt(text))


def test_whatever_happens_during_prefill_each_is_told_once_and_exactly(tiny: Tiny) -> None:
    random = Random(5)
    driver = Driver(tiny.engine(host_blocks=8))
    names = TEXTS[:6]
    for text in names:
        driver.admit(text, tiny.prompt(text), LIMITS, ASKED)
    for _ in range(40):
        for name in random.sample(driver.live, min(3, len(driver.live))):
            driver.step([Run(name, 2, random.choice([1, 2, 5]))], 1)
        if driver.live:
            name = random.choice(driver.live)
            random.choice([driver.engine.drop, driver.engine.offload])(name)
            # Its worker may have told of it already, and the scheduler not have heard: it tells again.
            if not driver.outputs[name] or random.random() < 0.5:
                driver.rows = [row for row in driver.rows if row.request_id != name]
                driver.readmit(name, 0, placement=2)
    driver.finish_all()
    for name in names:
        check(tiny, the_row(driver, name), tiny.prompt(name))


def test_a_beginning_that_others_have_computed_is_scored_all_the_same(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    prompt = tiny.prompt(" ".join(TEXTS[:3]))
    for name, sampling in (("first", Sampling()), ("second", ASKED)):
        driver.admit(name, prompt, LIMITS, sampling)
        driver.finish_all()
    check(tiny, the_row(driver, "second"), prompt)
    driver.admit("third", prompt, LIMITS, Sampling(embedding=True))
    (row,) = driver.step([Run("third", 0, 1024)])
    assert row.prefilled < len(prompt), "an embedding needs no more than the end of the prompt"
    assert row.embedding == pytest.approx(the_row(driver, "second").embedding, abs=1e-5)


def test_a_step_scores_only_so_many_tokens(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SCORED", 10)
    driver = Driver(tiny.engine())
    for name in ("a", "b"):
        driver.admit(name, tiny.prompt(TEXTS[0])[:8], LIMITS, ASKED)
    driver.admit("c", tiny.prompt(TEXTS[1])[:20], LIMITS)
    rows = driver.step([Run(name, 0, 1024) for name in "abc"])
    assert [(row.request_id, row.prefilled) for row in rows] == [("a", 8), ("b", 2), ("c", 20)]


def test_a_prompt_of_one_token_has_nothing_to_score(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    driver.admit("a", [5], LIMITS, ASKED)
    driver.finish_all()
    assert driver.finished == {"a": Finish.LENGTH}
    assert the_row(driver, "a").prompt_logprobs == ()


def test_a_request_that_has_output_already_tells_nothing_of_its_prompt(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    driver.admit("a", tiny.prompt(TEXTS[0]), LIMITS, ASKED)
    driver.finish_all()
    driver.rows.clear()
    driver.readmit("a", 2)
    driver.finish_all()
    assert not any(row.prompt_logprobs or row.embedding for row in driver.rows)


def test_scores_are_the_same_beside_drafted_requests(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    prompts = {text: tiny.prompt(text) for text in TEXTS[:3]}
    driver.admit("busy", tiny.prompt(TEXTS[5]) * 3, Limits(max_tokens=80, ignore_eos=True))
    driver.step([Run("busy", 4, 1024)])
    for text, prompt in prompts.items():
        driver.admit(text, prompt, LIMITS, ASKED)
    driver.finish_all(prefill_tokens=4)
    for text, prompt in prompts.items():
        check(tiny, the_row(driver, text), prompt)
