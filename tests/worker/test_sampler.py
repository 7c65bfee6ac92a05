"""The sampler of a whole step, on a CPU and on a device (a pretended one), against one that is written plainly."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.pretended import pretended
from worker_service.engine import sampler
from worker_service.engine.counted import Counted
from worker_service.engine.hooks import HOOKS, LogitsContext
from worker_service.engine.matcher import few_allowed
from worker_service.engine.sampler import Drawn, Sampler
from worker_service.engine.sampling import draw, logprobs, uniform
from worker_service.engine.types import Limits, Sampling

SAMPLINGS = [
    Sampling(),
    Sampling(logprobs=2),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, logprobs=0),
    Sampling(temperature=0.9, top_k=3),
    Sampling(temperature=1.1, top_k=10**9, top_p=0.8),
    Sampling(temperature=0.8, top_k=5, top_p=0.5, logprobs=5),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(temperature=1.0, frequency_penalty=-0.5, logprobs=1),
    Sampling(logit_bias=((0, 3.0), (2, -100.0)), presence_penalty=1.0),
]


def plainly(logits: torch.Tensor, asked: LogitsContext) -> Drawn:
    """Row by row, each with a copy of the logits and all that was emitted before counted anew."""
    own, tokens = asked.sampling, list[int]()
    raw = logits.log_softmax(-1)
    prompt = asked.tokens[: len(asked.tokens) - asked.start]
    for j, row in enumerate(logits.clone()):
        output = [*asked.tokens[len(prompt) :], *asked.drafts[:j]]
        for token in range(len(row)):
            if asked.allowed is not None and not asked.allowed[j, token // 8] >> token % 8 & 1:
                row[token] = -math.inf
        if asked.start + j < asked.limits.min_tokens and not asked.limits.ignore_eos:
            row[list(asked.eos_ids)] = -math.inf
        for token, value in own.logit_bias:
            row[token] += value
        if own.repetition_penalty != 1 or own.presence_penalty or own.frequency_penalty:
            for token in {*prompt, *output}:
                value = row[token]
                value = value / own.repetition_penalty if value > 0 else value * own.repetition_penalty
                count = torch.tensor(output.count(token))
                row[token] = value - (own.frequency_penalty * count + own.presence_penalty * (count > 0))
        chosen = draw(row, own, asked.start + j) if own.temperature else int(row.argmax())
        if chosen is None or not (own.temperature or row[chosen].isfinite()):
            break
        tokens.append(chosen)
        if j < len(asked.drafts) and chosen != asked.drafts[j]:
            break
    return Drawn(tokens, () if own.logprobs is None else logprobs(raw, tokens, own.logprobs))


def a_step(random: Random, vocabulary: int, requests: int) -> tuple[torch.Tensor, list[LogitsContext]]:
    """Requests of any kind, whose drafts are often right; the logits of some rows are no distribution."""
    parts, asked = [], []
    for _ in range(requests):
        own = replace(random.choice(SAMPLINGS), seed=random.randrange(2**64))
        own = replace(own, logit_bias=tuple((token % vocabulary, value) for token, value in own.logit_bias))
        n = random.randint(1, 5)
        logits = torch.tensor([[random.gauss(0, 3) for _ in range(vocabulary)] for _ in range(n)])
        if random.random() < 0.3:
            logits = logits.round()  # ties
        if random.random() < 0.2:
            logits[random.randrange(n), random.randrange(vocabulary)] = random.choice([math.nan, math.inf])
        tokens = [random.randrange(vocabulary) for _ in range(random.randint(1, 12))]
        limits = Limits(99, min_tokens=random.choice([0, 0, 3]), ignore_eos=random.random() < 0.3)
        words = -(-vocabulary // 32)
        allowed = np.packbits(
            np.random.default_rng(n).random((n, 32 * words)) < random.choice([0, 0.005, 0.7, 0.99]),
            axis=1,
            bitorder="little",
        )
        one = LogitsContext(
            tokens,
            [random.randrange(vocabulary) for _ in range(n - 1)],
            start=random.randint(0, len(tokens) - 1),
            sampling=own,
            limits=limits,
            eos_ids=frozenset({1}),
        )
        if random.random() < 0.3:
            few = few_allowed(allowed.view(np.int32), vocabulary) if random.random() < 0.8 else []
            one = replace(one, allowed=torch.from_numpy(allowed), few=few)
        for j in range(n - 1):  # what is drawn at j depends on the drafts before it
            right = plainly(logits, one).tokens[j : j + 1]
            if right and random.random() < 0.8:
                one = replace(one, drafts=[*one.drafts[:j], *right, *one.drafts[j + 1 :]])
        parts.append(logits)
        asked.append(replace(one, counted=Counted(len(tokens) - one.start)))
    return torch.cat(parts), asked


def same(one: Sequence[Drawn], other: Sequence[Drawn]) -> bool:
    """Bit for bit, where NaN equals NaN; which of equally likely tokens are told is not said."""
    return repr(list(map(told, one))) == repr(list(map(told, other)))


def told(drawn: Drawn) -> list[object]:
    top = []
    for each in drawn.logprobs:
        values = [value for _, value in each.top]
        # The last one may be one of several. NaN is one of all.
        sure = [values.count(value) == 1 and value > values[-1] for value in values]
        top.append([(token if known else None, value) for known, (token, value) in zip(sure, each.top, strict=True)])
    return [*drawn.tokens, *(each.logprob for each in drawn.logprobs), top]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), vocabulary=st.integers(3, 70) | st.just(2000), requests=st.integers(1, 6))
def test_a_step_draws_what_each_request_would_alone(seed: int, vocabulary: int, requests: int) -> None:
    logits, asked = a_step(Random(seed), vocabulary, requests)
    sizes = [len(each.drafts) + 1 for each in asked]
    expected = [plainly(own, each) for own, each in zip(logits.split(sizes), asked, strict=True)]
    assert same(Sampler(HOOKS).draw(logits.clone(), asked), expected)
    with pretended():
        assert same(Sampler(HOOKS).draw(logits.to("cuda:0"), asked), expected)


def test_a_step_on_a_device_waits_once_however_many_requests_there_are_and_whatever_they_ask() -> None:
    for requests in (1, 20):
        logits, asked = a_step(Random(requests), 50, requests)
        with pretended() as device:
            there = logits.to("cuda:0")
            device.counts.clear()
            Sampler(HOOKS).draw(there, asked)
        assert device.counts["waits"] == 1


def test_many_rows_are_drawn_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that their memory has a bound; what is drawn is the same."""
    logits, asked = a_step(Random(3), 40, 12)
    with pretended():
        whole = Sampler(HOOKS).draw(logits.to("cuda:0"), asked)
        monkeypatch.setattr(sampler, "_AT_ONCE", 100)
        assert same(Sampler(HOOKS).draw(logits.to("cuda:0"), asked), whole)


def test_a_hook_of_somebody_else_may_return_other_logits_and_sees_every_request() -> None:
    def only_seven(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        result = torch.full_like(logits, -math.inf)
        result[:, 7] = 0.0
        return result

    asked = [LogitsContext([1], [7, 3], 0, own, Limits(9), frozenset()) for own in (Sampling(), Sampling(1.0))]
    logits = torch.zeros(6, 9)
    with pretended():
        found = [Sampler([only_seven]).draw(where, asked) for where in (logits.clone(), logits.to("cuda:0"))]
    assert found == [[Drawn([7, 7]), Drawn([7, 7])]] * 2


@given(seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9), position=st.integers(0, 2**31))
def test_uniform_numbers_of_many_rows_are_those_of_each(seeds: list[int], position: int) -> None:
    places = np.arange(position, position + len(seeds), dtype=np.uint64)
    assert uniform(np.array(seeds, np.uint64), places).tolist() == [
        uniform(seed, int(at)) for seed, at in zip(seeds, places, strict=True)
    ]


def test_what_is_counted_is_the_text_and_never_a_draft_that_was_rejected() -> None:
    counted = Counted(2)
    counted.rows([5, 6, 5], [9, 5, 9], 0, 4)
    ids, prompt, *output = counted.rows([5, 6, 5, 7], [5], 0, 2).tolist()
    found = {token: (own, *later) for token, own, *later in zip(ids, prompt, *output, strict=True)}
    assert found == {5: (1, 1, 2), 6: (1, 0, 0), 9: (0, 0, 0), 7: (0, 1, 1)}
