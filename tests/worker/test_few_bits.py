"""Products with packed weights, whole or of few bits: they are those of the weights that the bits stand for, in every
layout."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from worker_service.engine.few_bits import Groups, quantise
from worker_service.engine.packed import Packed, PackedLinear, gather
from worker_service.gguf_groups import groups
from worker_service.model_files import ModelError

N, K, ROWS = 75, 192, 37  # outputs are no multiple of a panel, rows none of what is computed at a time
LAYOUTS = list(itertools.product((8, 4), (16, 32, 64), (torch.float16, torch.float32), (False, True)))
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def random_groups(bits: int, group: int, scales: torch.dtype, minima: bool) -> Groups:
    torch.manual_seed(0)
    numbers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (N, K), dtype=torch.int8)
    own = [(torch.randn(N, K // group) / 9).half() for _ in range(2)]
    if scales == torch.float32:  # as Q5_K has it: products of a half and a small integer, and numbers of five bits
        own = [part.float() * 37 for part in own]
        numbers = numbers // 8 - 112 if bits == 8 and minima else numbers
    return Groups(bits, numbers, own[0], own[1] if minima else None)


def linear(weights: Groups | torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> PackedLinear:
    like = torch.nn.Linear(K, N, bias=bias is not None, dtype=dtype)
    if bias is not None:
        like.bias = torch.nn.Parameter(bias.to(dtype))
    return PackedLinear(like, Packed(weights))


@pytest.mark.parametrize(("bits", "group", "scales", "minima"), LAYOUTS)
def test_in_float32_a_product_is_that_of_the_whole_weights_bit_for_bit(
    bits: int, group: int, scales: torch.dtype, minima: bool
) -> None:
    weights, x, bias = random_groups(bits, group, scales, minima), torch.randn(ROWS, K), torch.randn(N)
    whole, few = linear(weights.weight(), torch.float32, bias), linear(weights, torch.float32, bias)
    for count in (1, 2, 5, 6, 8, 9, ROWS):  # up to eight rows and more have their own way
        assert torch.equal(few(x[:count]), whole(x[:count]))


@pytest.mark.parametrize(("bits", "group", "scales", "minima"), LAYOUTS)
def test_in_bfloat16_only_activations_are_rounded(bits: int, group: int, scales: torch.dtype, minima: bool) -> None:
    """By less than bfloat16 itself rounds: to 16 bits of the largest one."""
    weights, x = random_groups(bits, group, scales, minima), torch.randn(ROWS, K).bfloat16()
    expected = x.double().numpy() @ weights.weight().double().numpy().T
    found = linear(weights, torch.bfloat16)(x)
    step = x.float().abs().amax(-1, keepdim=True) / (127 * 257)
    bound = step / 2 * weights.weight().abs().sum(-1) + 1e-3
    assert (np.abs(found.numpy() - expected) <= bound.numpy()).all()


def test_float32_weights_that_bfloat16_holds_take_half_the_memory_and_no_bit_changes() -> None:
    """A checkpoint in bfloat16 that is served in float32."""
    whole, x, bias = torch.randn(N, K).bfloat16().float(), torch.randn(ROWS, K), torch.randn(N)
    finer = whole.clone()
    finer[-1, -1] += 2**-12 * finer[-1, -1].abs()
    narrow, wide = (linear(weights, torch.float32, bias) for weights in (whole, finer))
    assert narrow.packed.nbytes * 2 == wide.packed.nbytes
    assert torch.equal(narrow.weight, whole)
    for count in range(1, ROWS + 1):
        assert torch.equal(narrow(x[:count])[:, :-1], wide(x[:count])[:, :-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group", "scales", "minima"), LAYOUTS)
def test_a_row_of_weights_is_what_its_bits_stand_for(
    bits: int, group: int, scales: torch.dtype, minima: bool, dtype: torch.dtype
) -> None:
    weights, some = random_groups(bits, group, scales, minima), torch.tensor([74, 0, 31, 32, 0])
    for index in (some, some.int(), some.repeat_interleave(2)[::2]):
        assert torch.equal(Packed(weights).rows(index, dtype), weights.weight()[some].to(dtype))


@pytest.mark.parametrize("output", [-1, N, N + 32])
def test_a_row_that_there_is_not_is_refused(output: int) -> None:
    packed = Packed(random_groups(4, 32, torch.float16, True))  # its last panel is filled up
    with pytest.raises(IndexError, match="75 outputs"):
        packed.rows(torch.tensor([0, output]))


def test_matrices_that_are_gathered_stay_what_they_were() -> None:
    kinds = [random_groups(4, 32, torch.float16, True), torch.randn(N, K), random_groups(8, 64, torch.float32, False)]
    x = torch.randn(ROWS, K)
    products = [linear(weights, torch.float32) for weights in kinds]
    before = [(product(x), product.weight) for product in products]
    gather([product.packed for product in products])
    for product, (result, weight) in zip(products, before, strict=True):
        assert torch.equal(product(x), result)
        assert torch.equal(product.weight, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "minima"), [(8, False), (4, True)])
def test_a_row_does_not_depend_on_the_others(bits: int, minima: bool, dtype: torch.dtype) -> None:
    product = linear(random_groups(bits, 32, torch.float16, minima), dtype)
    x = torch.randn(ROWS, K).to(dtype)
    together = product(x)
    for count in (1, 2, 7, 8, 9):
        parts = [product(x[i : i + count]) for i in range(0, ROWS, count)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_threads_that_lose_their_core_lose_no_product(bits: int, set_threads: Callable[[int], None]) -> None:
    """More threads than cores: others do what one has not begun."""
    torch.manual_seed(0)
    weights, dtype = torch.randn(2000, K), torch.float32 if bits == 32 else torch.bfloat16
    layer = torch.nn.Linear(K, len(weights), dtype=dtype)
    product = PackedLinear(layer, Packed(weights if bits == 32 else quantise(weights, bits)))
    x = torch.randn(3, K, dtype=dtype)
    set_threads(1)
    alone = product(x)
    for threads in (2, 5, 100):  # there are 63 panels
        set_threads(threads)
        found = [product(x) for _ in range(20)]  # all kept: memory that is used again holds the right numbers already
        assert all(torch.equal(each, alone) for each in found)


def test_activations_that_are_no_numbers_stay_so() -> None:
    x = torch.zeros(3, K, dtype=torch.bfloat16)
    x[0, 5], x[1, 5] = float("nan"), float("inf")
    found = linear(random_groups(8, 32, torch.float16, False), torch.bfloat16)(x)
    assert not found[:2].isfinite().any()
    assert (found[2] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_gguf_are_taken_without_a_loss(kind: str) -> None:
    quantisation, random = GGMLQuantizationType[kind], np.random.default_rng(0)
    size, width = GGML_QUANT_SIZES[quantisation]
    data = random.integers(0, 256, (N, 512 // size * width), dtype=np.uint8)
    halves = data.reshape(-1, width)
    for at in {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(kind, [0, 2]):
        halves[:, at : at + 2] = random.normal(0, 0.1, (len(halves), 1)).astype(np.float16).view(np.uint8)
    found, expected = groups(kind, data), torch.from_numpy(dequantize(data, quantisation))
    assert found is not None
    assert torch.equal(found.weight(), expected)
    assert torch.equal(Packed(found).rows(torch.arange(N)), expected)


def test_a_scale_that_is_no_number_is_refused() -> None:
    with pytest.raises(ModelError, match="kind Q8_0 has a scale that is no finite number"):
        groups("Q8_0", np.full((1, 34), 0x7F, np.uint8))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.5 / 127), (4, 0.51 * 2 / 15)])
def test_quantised_weights_are_near_the_whole_ones(bits: int, most: float) -> None:
    weight = torch.rand(N, K) * 2 - 1
    assert (quantise(weight, bits).weight() - weight).abs().max() <= most * 1.01
    assert torch.equal(quantise(torch.zeros(N, K), bits).weight(), torch.zeros(N, K))


def test_weights_without_a_number_are_not_quantised() -> None:
    with pytest.raises(ValueError, match="not finite"):
        quantise(torch.full((1, K), float("nan")), 8)
