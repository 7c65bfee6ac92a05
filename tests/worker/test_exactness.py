"""The engine's output is the target's own: transformers' greedy text, and the model's exact distribution."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.harness import Driver, Tiny
from worker_service.engine import sampling
from worker_service.engine.draft import NgramDrafter, NoDrafter
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
BLOCK_TOKENS = [8, 16]  # the native kernels take multiples of 16 only, so both ways to compute are tried
CLEAR = 1e-3  # where the reference's two best logits are closer, float32 sums of another shape may choose the other


def greedy_differences(tiny: Tiny, prompt: list[int], output: list[int]) -> list[int]:
    """Positions at which the reference, given the same text before, clearly prefers another token."""
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    return [i for i, token in enumerate(output) if clear[i] and int(logits[i].argmax()) != token]


@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_greedy_equals_generate_for_twelve_at_once_with_mixed_draft_lengths(tiny: Tiny, block_tokens: int) -> None:
    driver = Driver(tiny.engine(block_tokens=block_tokens))
    for i, text in enumerate(TEXTS):
        driver.admit(str(i), tiny.prompt(text), Limits(max_tokens=48))
    driver.finish_all(draft_len=lambda n: n % 7, prefill_tokens=7)
    for i, text in enumerate(TEXTS):
        prompt, output = tiny.prompt(text), driver.outputs[str(i)]
        reference = tiny.model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)
        assert output == reference[0, len(prompt) :].tolist() or not greedy_differences(tiny, prompt, output)
    assert sum(row.accepted for row in driver.rows) > 50  # speculation took part
    assert any(0 < row.accepted < row.drafted for row in driver.rows)


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=2**64 - 1),
]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), sampling=st.sampled_from(SAMPLINGS), block_tokens=st.sampled_from(BLOCK_TOKENS))
def test_preemption_that_keeps_offloads_or_drops_and_replay_leave_the_output_unchanged(
    tiny: Tiny, data: st.DataObject, sampling: Sampling, block_tokens: int
) -> None:
    def admit_all(driver: Driver) -> Driver:
        for i, text in enumerate(TEXTS[:5]):
            driver.admit(str(i), tiny.prompt(text), Limits(max_tokens=30), sampling)
        return driver

    undisturbed = admit_all(Driver(tiny.engine(drafter=NoDrafter())))
    undisturbed.finish_all()

    # Memory for two or three of the five, host memory for one: both run out.
    engine = tiny.engine(block_tokens=block_tokens, blocks=160 // block_tokens, host_blocks=64 // block_tokens)
    driver = admit_all(Driver(engine))
    for _ in range(30):
        chosen = data.draw(st.permutations(list(driver.admitted)))
        match data.draw(st.sampled_from(["step", "step", "step", "offload", "drop", "replay"])):
            case "step":
                draft_len, prefill = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 9))
                driver.step([Run(name, draft_len, prefill) for name in chosen], slots=2)
            case "offload":
                engine.offload(chosen[0])
            case "drop":
                engine.drop(chosen[0])
            case "replay":
                durable = data.draw(st.integers(0, len(driver.outputs[chosen[0]])))
                driver.readmit(chosen[0], durable, placement=2)
    while len(driver.finished) < len(driver.admitted):
        # As the scheduler would: of those that wait for each other's memory all but one give theirs up.
        first, *others = [name for name in driver.admitted if name not in driver.finished]
        for name in others:
            engine.offload(name)
        while first not in driver.finished:
            driver.step([Run(first, 3, 16)])

    assert driver.outputs == undisturbed.outputs
    for name in driver.admitted:
        engine.forget(name)
    assert engine.free_blocks == engine.blocks


@pytest.mark.parametrize(
    "shape",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 6, "top_p": 0.9}],
    ids=str,
)
def test_sampled_pairs_follow_the_exact_distribution(tiny: Tiny, shape: dict[str, float]) -> None:
    vocab, samples, prompt = 8, 3000, [3, 5, 3, 5, 3]
    model = _vocabulary_of(vocab)
    sampling = Sampling(**({"temperature": 1.0} | shape))  # type: ignore[arg-type]
    expected = _exact_pairs(model, prompt, sampling)

    engine = Engine(model, tiny.tokenizer, eos_ids=frozenset(), context_tokens=64, blocks=1000, drafter=NgramDrafter())
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for begin in range(0, samples, 500):
        driver = Driver(engine)
        for seed in range(begin, begin + 500):
            fields = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            # A third token lets the second be drawn in a round with drafts; it is not counted.
            driver.admit(str(seed), prompt, Limits(max_tokens=3), Sampling(**fields, seed=seed))  # type: ignore[arg-type]
        while len(driver.finished) < 500:
            driver.step((Run(name, 2, 8) for name in driver.admitted), slots=500)
        counts.update(tuple(output[:2]) for output in driver.outputs.values())
        drafted += sum(row.drafted for row in driver.rows)
        accepted += sum(row.accepted for row in driver.rows)
        for name in driver.admitted:
            engine.forget(name)

    assert drafted > samples / 10
    assert accepted
    impossible = [pair for pair in counts if expected.get(pair, 0.0) == 0.0]
    assert not impossible
    # Pairs too rare for the approximation are pooled.
    common = [pair for pair, p in expected.items() if p * samples >= 5]
    rest = 1 - sum(expected[pair] for pair in common)
    observed = [counts[pair] for pair in common] + [samples - sum(counts[pair] for pair in common)]
    wanted = [expected[pair] * samples for pair in common] + [rest * samples]
    if rest * samples < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
    assert chisquare(observed, [w * sum(observed) / sum(wanted) for w in wanted]).pvalue > 1e-3


def _vocabulary_of(vocab: int) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=0.25,
        )
        return LlamaForCausalLM(config).eval()


def _exact_pairs(model: LlamaForCausalLM, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """p(a) * p(b | a) of every pair, with the textbook filters written plainly, token by token."""
    vocab = model.config.vocab_size

    def next_token(tokens: list[int]) -> list[float]:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].double() / sampling.temperature
        p = logits.softmax(-1).tolist()
        order = sorted(range(vocab), key=lambda token: -p[token])
        kept = order[: sampling.top_k or vocab]
        mass = sum(p[token] for token in kept)
        nucleus, total = [], 0.0
        for token in kept:
            if total >= sampling.top_p:
                break
            nucleus.append(token)
            total += p[token] / mass
        norm = sum(p[token] for token in nucleus)
        return [p[token] / norm if token in nucleus else 0.0 for token in range(vocab)]

    first = next_token(prompt)
    then = {a: next_token([*prompt, a]) for a in range(vocab)}
    return {(a, b): first[a] * then[a][b] for a, b in itertools.product(range(vocab), repeat=2)}


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
