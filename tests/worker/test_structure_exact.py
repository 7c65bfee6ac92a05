"""Structured output is what the target itself would draw if it knew only the tokens that the grammar allows."""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, normalizers

from protos.structure import grammar
from protos.v1.types_pb2 import Structure
from tests.worker.harness import CLEAR, Driver, Tiny
from tests.worker.structures import FEW, KINDS, LIMITS, PROMPT, answer
from worker_service.engine import hooks
from worker_service.engine.matcher import Mask
from worker_service.engine.sampling import draw
from worker_service.engine.structure import Asked, Structures
from worker_service.engine.types import Run, Sampling

SHAPES = [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 3}]
ANSWERS = 800


@pytest.fixture(scope="module")
def ll_tokenizer(tiny: Tiny) -> LLTokenizer:
    return LLTokenizer(tiny.tokenizer.backend_tokenizer.to_str(), eos_token=[tiny.eos])


def allowed(tokenizer: LLTokenizer, form: str, output: list[int], vocabulary: int) -> torch.Tensor:
    """The mask after `output`, by a matcher of its own: bool [vocabulary]."""
    matcher = LLMatcher(tokenizer, form)
    assert matcher.consume_tokens(output)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return torch.from_numpy(bits[:vocabulary].astype(bool))


def masked(tiny: Tiny, tokenizer: LLTokenizer, output: list[int]) -> torch.Tensor:
    """The target's logits after `output`, those of all tokens that FEW forbids -inf."""
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([[*tiny.prompt(PROMPT), *output]])).logits[0, -1]
    return logits.masked_fill(~allowed(tokenizer, FEW, output, len(logits)), -torch.inf)


def exact(tiny: Tiny, tokenizer: LLTokenizer, own: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of every whole output, with the textbook filters written plainly."""
    texts: dict[tuple[int, ...], float] = {}

    def follow(output: list[int], chance: float) -> None:
        if output and (output[-1] == tiny.eos or not follows(output)):
            texts[tuple(output)] = chance
            return
        p = (masked(tiny, tokenizer, output).double() / own.temperature).softmax(-1).tolist()
        order = sorted((token for token, value in enumerate(p) if value), key=lambda token: -p[token])
        kept = order[: own.top_k or len(p)]
        total = sum(p[token] for token in kept)
        nucleus = [kept[i] for i in range(len(kept)) if sum(p[token] for token in kept[:i]) < own.top_p * total]
        norm = sum(p[token] for token in nucleus)
        for token in nucleus:
            follow([*output, token], chance * p[token] / norm)

    def follows(output: list[int]) -> bool:
        matcher = LLMatcher(tokenizer, FEW)
        matcher.consume_tokens(output)
        return not matcher.is_stopped()

    follow([], 1.0)
    return texts


def pvalue(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of a chi-square test. Texts too rare for the approximation are pooled."""
    assert counts.keys() <= expected.keys()
    common = [text for text, p in expected.items() if p * ANSWERS >= 5]
    observed = [counts[text] for text in common]
    wanted = [expected[text] * ANSWERS for text in common]
    if (rest := ANSWERS - sum(wanted)) > 1e-6:
        observed, wanted = [*observed, ANSWERS - sum(observed)], [*wanted, rest]
    return float(chisquare(observed, [w * sum(observed) / sum(wanted) for w in wanted]).pvalue)


def sampled(tiny: Tiny, own: Sampling) -> Counter[tuple[int, ...]]:
    engine = tiny.engine(blocks=2000)
    counts: Counter[tuple[int, ...]] = Counter()
    for begin in range(0, ANSWERS, 200):
        driver = Driver(engine)
        for seed in range(begin, begin + 200):
            driver.admit(str(seed), tiny.prompt(PROMPT), LIMITS, replace(own, seed=seed, grammar=FEW))
        while live := driver.live:
            driver.step((Run(name, 3, 64) for name in live), slots=200)
        counts.update(map(tuple, driver.outputs.values()))
        driver.forget_all()
        assert sum(row.accepted for row in driver.rows)
    return counts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_follow_the_targets_own_distribution_under_the_mask(
    tiny: Tiny, ll_tokenizer: LLTokenizer, shape: dict[str, float]
) -> None:
    own = Sampling(**({"temperature": 1.0} | shape))  # type: ignore[arg-type]
    counts, expected = sampled(tiny, own), exact(tiny, ll_tokenizer, own)
    assert len(expected) > 3
    assert pvalue(counts, expected) > 1e-3
    hotter = exact(tiny, ll_tokenizer, replace(own, temperature=1.5 * own.temperature))
    assert own.top_k or pvalue(counts, hotter) < 1e-3  # the test has the power to tell them apart


def test_each_token_is_the_plain_draw_from_the_masked_logits(tiny: Tiny, ll_tokenizer: LLTokenizer) -> None:
    for seed in range(8):
        own = Sampling(temperature=1.0, seed=seed, grammar=FEW)
        output = answer(tiny, own).outputs["r"]
        for i, token in enumerate(output):
            assert token == draw(masked(tiny, ll_tokenizer, output[:i]), own, i)


AMBIGUOUS = grammar(Structure(lark='start: a\na: ("x" | "foo") (c | "x") | "a"\nb: c | "b"\nc: (a b)+ | "c"'))


@pytest.mark.parametrize("form", [AMBIGUOUS, grammar(KINDS["json_schema"]), FEW], ids=["lark", "schema", "regex"])
def test_masks_follow_from_the_tokens_alone(tiny: Tiny, ll_tokenizer: LLTokenizer, form: str) -> None:
    """Not from drafts that were tried before: llguidance's own rollback would fail here for the first grammar."""
    structures = tiny.engine()._structures
    size, random = tiny.model.config.vocab_size, Random(0)
    for _ in range(8):
        matcher, output = structures.matcher(form, []), []
        for _ in range(12):
            asked = {"r": Asked(matcher, matcher.prune(drafts_from(random, size), 4))}
            mask = structures.take(structures.begin(asked), asked)["r"]
            assert isinstance(mask, Mask)
            bits = torch.from_numpy(np.unpackbits(mask.bits.numpy(), 1, count=size, bitorder="little")).bool()
            text = list(output)
            for j in range(len(asked["r"].drafts) + 1):
                assert torch.equal(bits[j], allowed(ll_tokenizer, form, text, size))
                text += asked["r"].drafts[j : j + 1]
            choices = torch.nonzero(bits[0])[:, 0].tolist()
            output.append(random.choice([token for token in choices if token != tiny.eos] or [tiny.eos]))
            if matcher.push(output[-1]):
                break


def drafts_from(random: Random, size: int) -> list[int]:
    return [random.randrange(size) for _ in range(4)]


def test_log_probabilities_stay_the_models_own(tiny: Tiny) -> None:
    driver = answer(tiny, Sampling(logprobs=2, grammar=FEW))
    output = driver.outputs["r"]
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([[*tiny.prompt(PROMPT), *output]])).logits[0]
    own = logits[-len(output) - 1 : -1].log_softmax(-1)
    given = [logprob for row in driver.rows for logprob in row.logprobs]
    for row, token, logprob in zip(own, output, given, strict=True):
        assert abs(float(row[token]) - logprob.logprob) < CLEAR
        assert logprob.top[0][0] == int(row.argmax())


def byte_fallback() -> Tokenizer:
    """Of the kind that came with SentencePiece: words begin with a mark, and what has no token is spelt in bytes."""
    texts = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    tokenizer = Tokenizer(
        models.BPE(
            {text: i for i, text in enumerate(texts)},
            [("\u2581", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("vocabulary", [263, 300], ids=["as the tokenizer", "filled up"])
def test_tokenizers_that_spell_in_bytes_are_understood(vocabulary: int) -> None:
    """Logits may be wider than the tokenizer: models fill their vocabularies up."""
    tokenizer, text = byte_fallback(), "ab a\u00e9"
    structures = Structures(tokenizer, vocabulary, frozenset({1}))
    matcher, tokens = structures.matcher(grammar(Structure(regex=text)), []), []
    while True:
        asked = {"r": Asked(matcher, [])}
        mask = structures.take(structures.begin(asked), asked)["r"]
        assert isinstance(mask, Mask)
        rows = hooks._cut_with_numpy(torch.arange(vocabulary, dtype=torch.float32)[None], mask.bits)
        tokens.append(int(rows.argmax()))
        if matcher.push(tokens[-1]):
            break
    assert tokenizer.decode(tokens) == text
    assert "<0xC3>" in [tokenizer.id_to_token(token) for token in tokens]
