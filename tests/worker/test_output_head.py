"""Logits in float32 from a head in bfloat16, and what it takes of memory."""

from unittest.mock import patch

import pytest
import torch

from tests.worker.harness import Tiny
from tests.worker.pretended import pretended
from worker_service.capacity import _held, read_config
from worker_service.engine.output_head import Float32Head, MixedHead, float32_head

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(("rows", "bias"), [(7, False), (7, True), (0, True)])
def test_a_head_that_multiplies_in_bfloat16_has_the_logits_of_one_in_float32(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 50, bias=bias).bfloat16()
    hidden = torch.randn(1, rows, 64).bfloat16()
    here = float32_head(plain)
    assert isinstance(here, Float32Head)
    with pretended():
        there = float32_head(plain.to(CUDA))
        assert isinstance(there, MixedHead)
        logits = there(hidden.to(CUDA))
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.cpu(), here(hidden), atol=1e-5, rtol=1e-5)
        assert there.weight.dtype == torch.bfloat16


def test_where_torch_has_no_such_product_the_head_has_a_copy_in_float32() -> None:
    def missing(*_: object, **__: object) -> None:
        raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")

    with pretended(), patch.object(torch, "mm", missing):
        assert isinstance(float32_head(torch.nn.Linear(4, 4).bfloat16().to(CUDA)), Float32Head)


@pytest.mark.parametrize(("has_product", "dtype"), [(True, torch.bfloat16), (False, torch.bfloat16)], ids=str)
def test_the_estimate_of_memory_counts_the_heads_copy(tiny: Tiny, has_product: bool, dtype: torch.dtype) -> None:
    config = read_config(tiny.folder)
    table = config.vocab_size * config.hidden_size
    layers = range(config.num_hidden_layers)
    with patch("worker_service.capacity.multiplies_to_float32", lambda *_: has_product):
        held = _held(tiny.folder, config, CUDA, dtype, "auto", layers, others=True)
    in_files = sum(p.numel() for p in tiny.model.parameters()) * dtype.itemsize
    copied = 4 if config.tie_word_embeddings else 2
    assert held - in_files == (0 if has_product else copied * table)
