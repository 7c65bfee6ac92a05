"""The engine's output is the target's own: transformers' greedy text, and the model's exact distribution."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.harness import Driver, Tiny, greedy_differences
from worker_service.engine import sampling
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.types import Limits, Run, Sampling

TEXTS = [
    "The quick brown fox",
    "A short request overtakes",
    "Once upon a time there was a queue. Once upon a time there was a",
    "one",
    "Speculative decoding drafts several tokens; the target model verifies them in one forward pass.",
    "lazy lazy lazy lazy lazy",
    "In the queue there were requests: short ones, long ones",
    "waits longer than needed",
    "dog",
    "the tail of the tail of the tail of the",
    "nobody",
    "jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick",
]
UNIFORM = sampling.uniform
BLOCK_TOKENS = [8, 16]  # the native kernels take multiples of 16 only, so both ways to compute are tried


@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_greedy_equals_generate_for_twelve_at_once_with_mixed_draft_lengths(tiny: Tiny, block_tokens: int) -> None:
    driver = Driver(tiny.engine(block_tokens=block_tokens))
    for i, text in enumerate(TEXTS):
        driver.admit(str(i), tiny.prompt(text), Limits(max_tokens=48))
    driver.finish_all(draft_len=lambda n: n % 7, prefill_tokens=7)
    for i, text in enumerate(TEXTS):
        prompt, output = tiny.prompt(text), driver.outputs[str(i)]
        reference = tiny.model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)
        assert output == reference[0, len(prompt) :].tolist() or not greedy_differences(tiny.model, prompt, output)
    assert sum(row.accepted for row in driver.rows) > 50  # speculation took part
    assert any(0 < row.accepted < row.drafted for row in driver.rows)


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=2**64 - 1),
]


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny) -> dict[Sampling, list[list[int]]]:
    """The texts as they must be: transformers' own where the choice is greedy, else ours one by one without drafts."""

    def output(text: str, sampling: Sampling) -> list[int]:
        prompt = tiny.prompt(text)
        if sampling.temperature == 0:
            whole = tiny.model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)
            return list(whole[0, len(prompt) :].tolist())
        driver = Driver(tiny.engine(drafter=NoDrafter()))
        driver.admit("r", prompt, Limits(max_tokens=30), sampling)
        driver.finish_all()
        return driver.outputs["r"]

    return {sampling: [output(text, sampling) for text in TEXTS] for sampling in SAMPLINGS}


@settings(max_examples=30, deadline=None)
@given(
    random=st.randoms(use_true_random=False),
    batch=st.integers(1, 16),
    sampling=st.sampled_from(SAMPLINGS),
    block_tokens=st.sampled_from(BLOCK_TOKENS),
)
def test_preemption_that_keeps_offloads_or_drops_and_replay_leave_the_output_unchanged(
    tiny: Tiny,
    undisturbed: dict[Sampling, list[list[int]]],
    random: Random,
    batch: int,
    sampling: Sampling,
    block_tokens: int,
) -> None:
    # Memory for a third of the batch, the host's for a sixth: both run out.
    blocks = (16 * batch + 64) // block_tokens
    driver = Driver(tiny.engine(block_tokens=block_tokens, blocks=blocks, host_blocks=blocks // 2))
    for i in range(batch):  # from the thirteenth on texts are there twice: they share what they begin with
        driver.admit(str(i), tiny.prompt(TEXTS[i % 12]), Limits(max_tokens=30), sampling)
    driver.disturb(random, actions=40, slots=batch)
    driver.finish_in_little_memory()
    for i in range(batch):
        output, expected = driver.outputs[str(i)], undisturbed[sampling][i % 12]
        tie = sampling.temperature == 0 and not greedy_differences(tiny.model, tiny.prompt(TEXTS[i % 12]), output)
        assert output == expected or tie
    driver.forget_all()


SHAPES = [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 6, "top_p": 0.9}]
PAIRS = 3000  # of each shape, with and without preemption: 60,000 draws in all
ALPHA = 1e-3
VOCAB = 8
PROMPT = [3, 5, 3, 5, 3]


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled_pairs_follow_the_exact_distribution(tiny: Tiny, shape: dict[str, float], preempted: bool) -> None:
    sampling = Sampling(**({"temperature": 1.0} | shape))  # type: ignore[arg-type]
    assert _pvalue(_sampled_pairs(tiny, sampling, preempted), _exact_pairs(sampling)) > ALPHA


def _hotter(logits: torch.Tensor, own: Sampling) -> torch.Tensor:
    return ((logits - logits.max()) / (own.temperature * 1.1)).exp()


@pytest.mark.parametrize(
    ("name", "wrong"), [("weights", _hotter), ("uniform", lambda seed, position: UNIFORM(seed, 0))], ids=["hot", "tied"]
)
def test_a_sampler_that_is_a_little_wrong_is_found_out(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., object]
) -> None:
    """A temperature off by a tenth, and tokens that are right one by one but not independent."""
    monkeypatch.setattr(sampling, name, wrong)
    plain = Sampling(temperature=1.0)
    assert _pvalue(_sampled_pairs(tiny, plain, preempted=False), _exact_pairs(plain)) < ALPHA


def _sampled_pairs(tiny: Tiny, own: Sampling, preempted: bool) -> Counter[tuple[int, ...]]:
    """The first two tokens that PAIRS requests draw; each has a seed of its own."""
    engine = Engine(
        _model(),
        tiny.tokenizer,
        eos_ids=frozenset(),
        context_tokens=64,
        blocks=1000,
        block_tokens=4,
        host_blocks=100,
        drafter=NgramDrafter(),
    )
    counts: Counter[tuple[int, ...]] = Counter()
    random, batch = Random(0), 250
    drafted = accepted = 0
    for begin in range(0, PAIRS, batch):
        driver = Driver(engine)
        for seed in range(begin, begin + batch):
            # A third token lets the second be drawn in a round with drafts; it is not counted.
            driver.admit(str(seed), PROMPT, Limits(max_tokens=3), replace(own, seed=seed))
        while live := driver.live:
            if preempted:  # a third of them keep their KV and wait, a third of the others lose it before they run
                random.shuffle(live)
                live = live[len(live) // 3 :]
                for name in live[: len(live) // 3]:
                    random.choice([engine.offload, engine.drop])(name)
            driver.step((Run(name, 2, 8) for name in live), slots=batch)
        counts.update(tuple(output[:2]) for output in driver.outputs.values())
        drafted += sum(row.drafted for row in driver.rows)
        accepted += sum(row.accepted for row in driver.rows)
        driver.forget_all()
    assert drafted > PAIRS / 10
    assert accepted
    return counts


def _pvalue(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of a chi-square test. Pairs too rare for the approximation are pooled."""
    assert not [pair for pair in counts if expected[pair] == 0.0]
    common = [pair for pair, p in expected.items() if p * PAIRS >= 5]
    rest = 1 - sum(expected[pair] for pair in common)
    observed = [counts[pair] for pair in common] + [PAIRS - sum(counts[pair] for pair in common)]
    wanted = [expected[pair] * PAIRS for pair in common] + [rest * PAIRS]
    if rest * PAIRS < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(chisquare(observed, [w * sum(observed) / sum(wanted) for w in wanted]).pvalue)


def _model() -> LlamaForCausalLM:
    """Tiny, of VOCAB tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=0.25,
        )
        return LlamaForCausalLM(config).eval()


def _exact_pairs(own: Sampling) -> dict[tuple[int, ...], float]:
    """p(a) * p(b | a) of every pair, with the textbook filters written plainly, token by token."""
    model = _model()

    def next_token(tokens: list[int]) -> list[float]:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].double() / own.temperature
        p = logits.softmax(-1).tolist()
        order = sorted(range(VOCAB), key=lambda token: -p[token])
        kept = order[: own.top_k or VOCAB]
        mass = sum(p[token] for token in kept)
        nucleus, total = [], 0.0
        for token in kept:
            if total >= own.top_p:
                break
            nucleus.append(token)
            total += p[token] / mass
        norm = sum(p[token] for token in nucleus)
        return [p[token] / norm if token in nucleus else 0.0 for token in range(VOCAB)]

    first = next_token(PROMPT)
    then = {a: next_token([*PROMPT, a]) for a in range(VOCAB)}
    return {(a, b): first[a] * then[a][b] for a, b in itertools.product(range(VOCAB), repeat=2)}


def test_uniforms_are_splitmix64() -> None:
    """Steele et al.'s generator from state 0 begins with these; seeds and positions select, and nothing else."""
    assert [sampling._mix((i + 1) * sampling._GAMMA & sampling._MASK) for i in range(2)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
    ]
    drawn = [sampling.uniform(seed, position) for seed in range(60) for position in range(60)]
    assert len(set(drawn)) == 3600
    assert kstest(drawn, "uniform").pvalue > 1e-3


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: 1 - 2**-53)
    logits = torch.tensor([1.0, 2.0, -float("inf"), -float("inf")])
    assert sampling.draw(logits, Sampling(temperature=1.0), 0) == 1
