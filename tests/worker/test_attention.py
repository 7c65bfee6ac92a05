"""Attention over KV in blocks: both ways give what plain attention over each whole text gives."""

import copy
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.tiny_model import make_tiny_model
from tests.worker.harness import Tiny
from worker_service.engine import gathered, host_blocks, native
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


def attention_of(
    kind: type, dtype: torch.dtype, block_tokens: int = 16, dim: int = 32
) -> TorchAttention | NativeAttention:
    memory, shapes = MEMORY | {"block_tokens": block_tokens}, [SHAPES[0]._replace(dim=dim)]
    if kind is NativeAttention:
        return NativeAttention(shapes, 1024, **memory, dtype=dtype)
    return TorchAttention(shapes, 1024, **memory, device=torch.device("cpu"), dtype=dtype)


def test_there_are_native_kernels_where_there_is_a_compiler() -> None:
    assert native.kernels() is not None or not any(map(shutil.which, ("c++", "g++", "clang++")))


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(0, 0.0, False), (1, 0.0, False), (20, 0.0, False), (20, 1.5, False), (20, 0.0, True), (0, 1.5, True)],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("kind", "block_tokens", "dim"),
    [*((NativeAttention, *sizes) for sizes in ((16, 32), (32, 32), (48, 32), (64, 64))), (TorchAttention, 16, 32)],
)
def test_attention_over_blocks_is_plain_attention(
    kind: type, block_tokens: int, dim: int, dtype: torch.dtype, window: int, softcap: float, sinks: bool
) -> None:
    torch.manual_seed(0)
    attention = attention_of(kind, dtype, block_tokens, dim)
    attention._data[0].fill_(torch.nan)  # a broken request may have left anything in the blocks
    options = Options(0.2, window, softcap, torch.randn(6).to(dtype) if sinks else None)
    tables = [array("i", [7, 2, 30, 9]), array("i", [1, 0, 3]), array("i", [11])]
    rounds = [[40, 1, 9], [1, 20, 3], [5, 5, 1], [17, 16, 1]]  # tokens of each text in each round
    texts = [[torch.randn(sum(r[i] for r in rounds), heads, dim).to(dtype) for heads in (6, 2, 2)] for i in range(3)]
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


@pytest.mark.parametrize(
    ("bytes_", "capped"), [(1 << 11, False), (1 << 14, False), (1 << 16, False), (1 << 11, True), (1 << 17, True)]
)
def test_attention_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch, bytes_: int, capped: bool) -> None:
    """Of requests, of heads, of rows: as many as fit into so many bytes."""
    torch.manual_seed(0)
    options = Options(0.2, 20, 1.5 if capped else 0.0, torch.randn(6) if capped else None)
    tables = [array("i", range(10 * i, 10 * i + 10)) for i in range(4)]
    ranges = [QueryRange(0, 3, 130, tables[0]), QueryRange(3, 1, 120, tables[1]), QueryRange(4, 40, 90, tables[2])]
    new, results, sizes = [torch.randn(44, heads, 32) for heads in (6, 2, 2)], [], list[gathered.Piece]()

    def noted(*sizes_: int, piece: Callable[..., gathered.Piece] = gathered.piece) -> gathered.Piece:
        sizes.append(piece(*sizes_))
        return sizes[-1]

    for most in (gathered.PIECE_BYTES, bytes_):
        monkeypatch.setattr(gathered, "PIECE_BYTES", most)
        attention = attention_of(TorchAttention, torch.float32)
        for layer in attention._data:
            layer.copy_(torch.linspace(-1, 1, layer.numel()).view(layer.shape).sin())
        monkeypatch.setattr(gathered, "piece", noted)
        attention.begin(ranges)
        results.append(attention.attend(*new, 0, options))
    whole, pieces = sizes[:2], sizes[2:]
    assert whole == [(2, 2, 3), (1, 2, 40)]
    assert pieces != whole
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-6)


def test_no_tensor_of_attention_grows_with_prompt_and_text_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last 64 tokens after 8,128: its mask alone would have 2 MiB for 4 heads of a KV head."""
    monkeypatch.setattr(gathered, "PIECE_BYTES", 1 << 18)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **kwargs or {})
            if not any(each.alias_info for each in func._schema.returns):  # else it is memory that there was
                largest = max([largest, *(x.nbytes for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
            return result

    for options in (Options(0.2), Options(0.2, softcap=1.5)):
        attention = TorchAttention(
            [AttentionShape(8, 2, 32)], 8192, 513, 16, device=torch.device("cpu"), dtype=torch.float32
        )
        attention.begin([QueryRange(0, 64, 8128, array("i", range(512)))])
        new = [torch.randn(64, heads, 32) for heads in (8, 2, 2)]
        with Watch():
            attention.attend(*new, 0, options)
        assert largest == 8192 * 32 * 4  # the keys of one head, and of one text


@given(*[st.integers(1, 300)] * 3, st.integers(1, 16), st.integers(1, 1 << 20), st.integers(64, 2048), st.booleans())
def test_a_piece_takes_a_bounded_part_of_memory(
    batch: int, heads: int, rows: int, share: int, past: int, a_token: int, capped: bool
) -> None:
    size = gathered.piece(batch, heads, rows, share, past, a_token, capped)
    assert all(1 <= own <= all_ for own, all_ in zip(size, (batch, heads, rows), strict=True))
    of_heads = size.heads * size.requests
    scores = past * share * (16 * of_heads if capped else 8 * size.requests) * size.rows
    assert 2 * past * a_token * of_heads <= gathered.PIECE_BYTES or of_heads == 1
    assert scores <= gathered.PIECE_BYTES or size.requests == size.rows == 1


def test_masks_of_long_texts_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of short ones are, for all layers of the pass."""
    ranges = [QueryRange(0, 30, 0, array("i", [0, 1])), QueryRange(30, 1, 100, array("i", range(2, 9)))]
    new = [torch.randn(31, heads, 32) for heads in (6, 2, 2)]
    kept = []
    for most in (gathered.PIECE_BYTES, 8 * 3 * 30 * 32):  # the first range's alone is as large as what is kept
        attention = attention_of(TorchAttention, torch.float32)
        assert isinstance(attention, TorchAttention)
        with monkeypatch.context() as context:
            context.setattr(gathered, "PIECE_BYTES", most)
            attention.begin(ranges)
        for _ in range(2):
            attention.attend(*new, 0, Options(0.2))
        kept.append(sum(mask.numel() for group in attention._groups for mask in group._masks.values()))
    assert kept[0] == 3 * (30 * 32 + 7 * 16)
    assert kept[1] == 3 * 7 * 16  # which comes first


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


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [NativeAttention, TorchAttention])
def test_what_is_saved_comes_back_in_other_blocks(kind: type, first: int) -> None:
    """All of it, or from a block on: the one before is another request's, and as it is."""
    torch.manual_seed(0)
    attention = attention_of(kind, torch.float32)
    text = [torch.randn(30, heads, 32) for heads in (6, 2, 2)]
    attention.begin([QueryRange(0, 29, 0, array("i", [4, 5]))])
    attention.attend(*(x[:29] for x in text), 0, Options(0.2))
    saved, before = attention.save([4, 5]), [layer[:, 4].clone() for layer in attention._data]
    results = []
    for table in (array("i", [4, 5]), array("i", [4 if first else 20, 3])):
        if table[1] == 3:
            attention.restore(table[first:], saved, first)
        attention.begin([QueryRange(0, 1, 29, table)])
        results.append(attention.attend(*(x[29:] for x in text), 0, Options(0.2)))
    assert torch.equal(*results)
    assert all(torch.equal(layer[:, 4], own) for layer, own in zip(attention._data, before, strict=True))


def test_copies_on_the_host_take_no_more_memory_than_those_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks each has."""
    monkeypatch.setattr(host_blocks, "ARRAY_BYTES", 60_000)  # of a few blocks
    attention, random = attention_of(TorchAttention, torch.float32), Random(0)
    kept: list[tuple[list[int], list[int], list[torch.Tensor]]] = []
    for _ in range(40):
        for layer in attention._data:
            layer.normal_()
        table = random.sample(range(8), random.randint(1, 5))
        kept.append((table, attention.save(table), [layer[:, table].clone() for layer in attention._data]))
        while sum(len(one) for one, *_ in kept) > 9:
            there, saved, expected = kept.pop(random.randrange(len(kept)))
            attention.restore(there, saved)
            attention.discard(saved)
            assert all(torch.equal(layer[:, there], own) for layer, own in zip(attention._data, expected, strict=True))
    assert attention._host.blocks <= 9 + 5 + attention._host._each


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [130, 160])  # tiles take 32 at a time, vectors 2
@pytest.mark.parametrize("rows", [1, 7, 8, 19, 32, 77])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, rows: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(inputs, 75, bias=bias).to(dtype)  # 75: not of whole panels
    x = torch.randn(rows, inputs).to(dtype)
    expected = torch.nn.functional.linear(x.float(), plain.weight.float(), plain.bias.float() if bias else None)
    torch.testing.assert_close(PackedLinear(plain)(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inputs", [130, 160])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_product_does_not_depend_on_the_other_rows(dtype: torch.dtype, inputs: int) -> None:
    torch.manual_seed(0)
    linear, x = PackedLinear(torch.nn.Linear(inputs, 75).to(dtype)), torch.randn(77, inputs).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 9, 16, 17, 32, 33, 64, 77):
        assert torch.equal(linear(x[:rows]), alone[:rows])


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
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)], ids=str)
def test_the_native_decoder_computes_what_the_module_computes(
    config: LlamaConfig, dtype: torch.dtype, tolerance: float
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = copy.deepcopy(config)  # a target changes its own
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
    model = model.to(dtype).float()
    tokens = list(range(40))
    with torch.inference_mode():
        own = model(torch.tensor([tokens]), output_hidden_states=True)
        expected = own.logits[0]
        target = Target(model.to(dtype))
        pool = target.new_pool(8, 32)
        target.expose([0, 1])
        assert isinstance(target._decoder, NativeDecoder)
        kv = _kv(pool, 30)
        first = target.forward([InputSequence(kv, 0, tokens[:30], 0)]).logits
        kv.extend(10)
        second, hidden, states, _ = target.forward([InputSequence(kv, 30, tokens[30:], 7)])
    torch.testing.assert_close(first.float(), expected[:30], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(second.float(), expected[37:], atol=tolerance, rtol=tolerance)
    assert hidden.shape == (3, 64)
    between = torch.cat(own.hidden_states[:2], -1)[0, 30:]  # of all tokens, whether logits are wanted or not
    torch.testing.assert_close(states.float(), between, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("threads", "heads", "block_tokens"), [(1, 4, 16), (2, 4, 16), (2, 2, 32)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@torch.inference_mode()
def test_native_logits_do_not_depend_on_the_batch_at_all(
    tmp_path: Path, dtype: torch.dtype, threads: int, heads: int, block_tokens: int
) -> None:
    """Bit for bit, in bfloat16 too: each sum is taken in one order, whatever else is computed with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        folder = make_tiny_model(tmp_path, heads=heads)
        target = Target(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
        pool = target.new_pool(200, block_tokens)
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


@pytest.mark.parametrize(("dim", "block_tokens"), [(80, 16), (80, 32), (64, 32)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_does_not_depend_on_how_many_tokens_a_pass_has(
    dtype: torch.dtype, dim: int, block_tokens: int
) -> None:
    """Bit for bit, where each head has keys of its own, and one row is all that a product has."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(40, 2, dim).to(dtype) for _ in range(3))
    shape = AttentionShape(heads=2, kv_heads=2, dim=dim)

    def attended(width: int) -> torch.Tensor:
        attention = NativeAttention([shape], 1024, blocks=4, block_tokens=block_tokens, dtype=dtype)
        rows = []
        for at in range(0, 40, width):
            attention.begin([QueryRange(0, width, at, array("i", [3, 1, 2]))])
            part = slice(at, at + width)
            rows.append(attention.attend(query[part], key[part], value[part], 0, Options(0.2)).clone())
        return torch.cat(rows)

    for width in (2, 5, 20, 40):
        assert torch.equal(attended(width), attended(1))


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(0, 0.0, False), (0, 1.5, True), (700, 0.0, True), (40, 1.5, False)]
)
@pytest.mark.parametrize("block_tokens", [16, 48])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_long_text_gives_the_same_whether_threads_share_it_or_not(
    set_threads: Callable[[int], None],
    dtype: torch.dtype,
    block_tokens: int,
    window: int,
    softcap: float,
    sinks: bool,
) -> None:
    """Bit for bit. One thread shares nothing. Two and three share a text that is alone; two do not share it among 30
    others."""
    torch.manual_seed(0)
    before, others = 1099, 30
    new = [torch.randn(before + 6 + others, heads, 32).to(dtype) for heads in (6, 2, 2)]
    options = Options(0.2, window, softcap, torch.randn(6).to(dtype) if sinks else None)
    blocks = -(-(before + 6) // block_tokens)
    text = array("i", reversed(range(blocks)))

    def attended(*passes: tuple[int, int], also: int = 0) -> torch.Tensor:
        """The text's tokens begin..end of each pass, the later of which have as many others beside them."""
        memory = {"blocks": blocks + also, "block_tokens": block_tokens}
        attention, rows = NativeAttention(SHAPES, 2048, **memory, dtype=dtype), []
        for number, (begin, end) in enumerate(passes):
            n, beside = end - begin, also if number else 0
            ranges = [QueryRange(0, n, begin, text)]
            ranges += [QueryRange(n + i, 1, 0, array("i", [blocks + i])) for i in range(beside)]
            attention.begin(ranges)
            parts = (torch.cat([x[begin:end], x[before + 6 :][:beside]]) for x in new)
            rows.append(attention.attend(*parts, 0, options)[:n].clone())
        return torch.cat(rows)

    set_threads(1)
    alone = attended((0, before), *((i, i + 1) for i in range(before, before + 6)))
    for threads in (2, 3):
        set_threads(threads)
        assert torch.equal(attended((0, before), (before, before + 6)), alone)
        assert torch.equal(attended((0, before), (before, before + 5), (before + 5, before + 6), also=others), alone)
        tens = [(i, min(i + 10, before)) for i in range(0, before, 10)]
        assert torch.equal(attended(*tens, (before, before + 6)), alone)
    expected = plain_attention(*(x[: before + 6].float() for x in new), options)
    torch.testing.assert_close(alone.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


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
