"""Attention over KV in blocks: both ways give what plain attention over each whole text gives."""

import shutil
from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.worker.harness import Tiny
from worker_service.engine import native
from worker_service.engine.attention import NativeAttention, QueryRange, TorchAttention
from worker_service.engine.decoder import NativeDecoder
from worker_service.engine.kv import KV, BlockPool
from worker_service.engine.packed import PackedLinear
from worker_service.engine.probe import Options
from worker_service.engine.shape import AttentionShape
from worker_service.engine.target import InputSequence, Target

SHAPES = [AttentionShape(heads=6, kv_heads=2, dim=32)]
MEMORY = {"blocks": 40, "block_tokens": 16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attention_of(kind: type, dtype: torch.dtype) -> TorchAttention | NativeAttention:
    if kind is NativeAttention:
        return NativeAttention(SHAPES, 1024, **MEMORY, dtype=dtype)
    return TorchAttention(SHAPES, 1024, **MEMORY, device=torch.device("cpu"), dtype=dtype)


def test_there_are_native_kernels_where_there_is_a_compiler() -> None:
    assert native.kernels() is not None or not any(map(shutil.which, ("c++", "g++", "clang++")))


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(0, 0.0, False), (1, 0.0, False), (20, 0.0, False), (20, 1.5, False), (20, 0.0, True), (0, 1.5, True)],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [NativeAttention, TorchAttention])
def test_attention_over_blocks_is_plain_attention(
    kind: type, dtype: torch.dtype, window: int, softcap: float, sinks: bool
) -> None:
    torch.manual_seed(0)
    attention = attention_of(kind, dtype)
    options = Options(0.2, window, softcap, torch.randn(6).to(dtype) if sinks else None)
    tables = [array("i", [7, 2, 30, 9]), array("i", [1, 0, 3]), array("i", [11])]
    rounds = [[40, 1, 9], [1, 20, 3], [5, 5, 1], [17, 16, 1]]  # tokens of each text in each round
    texts = [[torch.randn(sum(r[i] for r in rounds), heads, 32).to(dtype) for heads in (6, 2, 2)] for i in range(3)]
    at = [0, 0, 0]
    for lengths in rounds:
        begin, ranges = 0, []
        for i, n in enumerate(lengths):
            ranges.append(QueryRange(begin, n, at[i], tables[i]))
            begin += n
        attention.begin(ranges)
        new = (torch.cat([text[j][a : a + n] for text, a, n in zip(texts, at, lengths, strict=True)]) for j in range(3))
        result = attention.attend(*new, 0, options)
        for i, each in enumerate(ranges):
            at[i] += each.n
            expected = plain_attention(*(x[: at[i]].float() for x in texts[i]), options)[-each.n :]
            got = result[each.begin : each.begin + each.n].float()
            torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """Over one whole text, from the definition: all are float32 [T, heads, dim]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * options.scale
    if options.softcap:
        scores = options.softcap * (scores / options.softcap).tanh()
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    if options.window:
        seen = seen.triu(1 - options.window)
    weights = scores.exp() * seen
    mass = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        mass = mass + options.sinks.float().exp()[:, None, None]
    return torch.einsum("hts,shd->thd", weights / mass, v.repeat_interleave(group, 1))


def test_a_batch_is_not_padded_to_the_longest_text() -> None:
    """One long text among short ones: what is gathered is at most twice what there is."""
    attention = attention_of(TorchAttention, torch.float32)
    assert isinstance(attention, TorchAttention)
    lengths = [30 * 16, 16, 17, 40, 3]
    attention.begin([QueryRange(i, 1, n - 1, array("i", range(30))) for i, n in enumerate(lengths)])
    gathered = sum(group.tables.numel() for group in attention._groups)
    assert gathered <= 2 * sum(-(-n // 16) for n in lengths)


@pytest.mark.parametrize("kind", [NativeAttention, TorchAttention])
def test_what_is_saved_comes_back_in_other_blocks(kind: type) -> None:
    torch.manual_seed(0)
    attention = attention_of(kind, torch.float32)
    text = [torch.randn(30, heads, 32) for heads in (6, 2, 2)]
    attention.begin([QueryRange(0, 29, 0, array("i", [4, 5]))])
    attention.attend(*(x[:29] for x in text), 0, Options(0.2))
    saved = attention.save([4, 5])
    results = []
    for table in (array("i", [4, 5]), array("i", [20, 3])):
        if table[0] == 20:
            attention.restore(table, saved)
        attention.begin([QueryRange(0, 1, 29, table)])
        results.append(attention.attend(*(x[29:] for x in text), 0, Options(0.2)))
    assert torch.equal(*results)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 19])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(130, 75, bias=bias).to(dtype)  # neither is a multiple of what the kernel takes at a time
    x = torch.randn(rows, 130).to(dtype)
    expected = torch.nn.functional.linear(x.float(), plain.weight.float(), plain.bias.float() if bias else None)
    torch.testing.assert_close(PackedLinear(plain)(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(num_key_value_heads=1),
        LlamaConfig(num_key_value_heads=2, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        MistralConfig(num_key_value_heads=2, sliding_window=5),
        Qwen2Config(num_key_value_heads=2),
        Qwen3Config(num_key_value_heads=2),
    ],
    ids=["llama", "scaled positions", "sliding window", "biases", "norms of heads"],
)
def test_the_native_decoder_computes_what_the_module_computes(config: LlamaConfig) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, value in (small | {"vocab_size": 50, "initializer_range": 0.2}).items():
        setattr(config, name, value)
    config.head_dim = 32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    tokens = list(range(40))
    with torch.inference_mode():
        own = model(torch.tensor([tokens]), output_hidden_states=True)
        expected = own.logits[0]
        target = Target(model)
        pool = target.new_pool(8, 16)
        target.expose([0, 1])
        assert isinstance(target._decoder, NativeDecoder)
        kv = _kv(pool, 30)
        first = target.forward([InputSequence(kv, 0, tokens[:30], 0)]).logits
        kv.extend(10)
        second, hidden, states, _ = target.forward([InputSequence(kv, 30, tokens[30:], 7)])
    torch.testing.assert_close(first, expected[:30], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(second, expected[37:], atol=1e-3, rtol=1e-3)
    assert hidden.shape == (3, 64)
    between = torch.cat(own.hidden_states[:2], -1)[0, 30:]  # of all tokens, whether logits are wanted or not
    torch.testing.assert_close(states, between, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@torch.inference_mode()
def test_native_logits_do_not_depend_on_the_batch_at_all(tiny: Tiny, dtype: torch.dtype, threads: int) -> None:
    """Bit for bit, in bfloat16 too: each sum is taken in one order, whatever else is computed with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        target = Target(AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=dtype).eval())
        pool = target.new_pool(200, 16)
        assert isinstance(target._decoder, NativeDecoder)
        text = [(7 * i * i) % 300 for i in range(60)]

        def logits(batch: int, width: int) -> torch.Tensor:
            """Of `text` after a prefill of 20, among others of other lengths, `width` tokens a pass."""
            caches = [_kv(pool, 20 + 3 * i) for i in range(batch)]
            for i, kv in enumerate(caches):
                target.forward([InputSequence(kv, 0, text[: 20 + 3 * i] if i == 0 else text[3 : 23 + 3 * i], 19)])
            rows = []
            for begin in range(20, 60, width):
                segments = []
                for i, kv in enumerate(caches):
                    kv.extend(width)
                    part = text[begin : begin + width] if i == 0 else [i] * width
                    segments.append(InputSequence(kv, kv.length - width, part, 0))
                rows.append(target.forward(segments)[0][:width].clone())
            for kv in caches:
                kv.release()
            return torch.cat(rows)

        alone = logits(1, 1)
        for batch, width in ((2, 1), (8, 1), (11, 1), (1, 5), (3, 4), (8, 5)):
            assert torch.equal(logits(batch, width), alone)
    finally:
        torch.set_num_threads(before)


def _kv(pool: BlockPool, tokens: int) -> KV:
    kv = KV(pool)
    kv.extend(tokens)
    return kv


@pytest.mark.parametrize("layers", [[1], [0, 1, 2], [2]], ids=str)
@pytest.mark.parametrize("native_code", [True, False], ids=["native", "torch"])
@torch.inference_mode()
def test_states_between_layers_are_those_of_the_module(
    tiny: Tiny, layers: list[int], native_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last layer: what leaves it, before the norm."""
    if not native_code:
        monkeypatch.setattr(native, "kernels", lambda: None)
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32).eval()
    found: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    tokens = list(range(30, 50))
    own = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat([*own[:2], found[0]], -1)[0].view(20, 3, -1)[:, layers].flatten(1)
    target = Target(model)
    kv = _kv(target.new_pool(4, 8), 20)
    target.expose(layers)
    for _ in range(2):  # a pass keeps nothing of the one before
        states = target.forward([InputSequence(kv, 0, tokens, 19)]).states
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layers", [[3], [-1], [1, 0], [1, 1]], ids=str)
def test_layers_that_a_model_does_not_have_are_refused(tiny: Tiny, layers: list[int]) -> None:
    target = Target(AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32).eval())
    target.new_pool(4, 8)
    with pytest.raises(ValueError, match="among its 2"):
        target.expose(layers)
