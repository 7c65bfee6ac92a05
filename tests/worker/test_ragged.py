"""What FlashInfer is told: a stand-in that does what its documentation says of these arrays (as of version 0.6) attends
as plain attention does. The kernels themselves need a GPU."""

import sys
from array import array
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.worker.pretended import pretended
from tests.worker.test_attention import plain_attention
from worker_service.config import Settings
from worker_service.engine.attention import QueryRange, paged_attention
from worker_service.engine.probe import Options
from worker_service.engine.ragged import problem
from worker_service.engine.shape import AttentionShape

CUDA = torch.device("cuda", 0)
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 16


class Wrapper:
    """`plan` takes arrays [requests + 1], [requests + 1], [pages of all requests] and [requests]."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "HND"  # pages are [kv heads, page size, dim]

    def plan(self, *arrays: Any, causal: bool, **options: Any) -> None:
        *arrays, heads, kv_heads, dim, page = arrays
        assert (heads, kv_heads, dim, page, causal) == (HEADS, KV_HEADS, DIM, BLOCK, True)
        assert all(x.device.type == "cpu" and x.dtype == torch.int32 for x in arrays)
        assert options["q_data_type"] == options["kv_data_type"] == torch.bfloat16
        self.arrays, self.options = [x.tolist() for x in arrays], options
        Wrapper.plans += 1

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, offsets, indices, last = self.arrays
        out = torch.zeros_like(q)
        for i in range(len(last)):
            mine = indices[offsets[i] : offsets[i + 1]]
            length = (len(mine) - 1) * BLOCK + last[i]
            k, v = (
                torch.cat([x[page] for page in mine], 1)[:, :length].repeat_interleave(HEADS // KV_HEADS, 0).float()
                for x in pages
            )
            own = q[tokens[i] : tokens[i + 1]].transpose(0, 1).float()
            scores = own @ k.mT * self.options["sm_scale"]
            if cap := self.options["logits_soft_cap"]:
                scores = cap * (scores / cap).tanh()
            at = torch.arange(length - own.shape[1], length, device=q.device)[:, None]
            key = torch.arange(length, device=q.device)
            left = self.options["window_left"]
            seen = (key <= at) & (key >= at - left) if left >= 0 else key <= at
            out[tokens[i] : tokens[i + 1]] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
        return out


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def ragged_attention(layers: int = 1) -> Any:
    shapes = [AttentionShape(HEADS, KV_HEADS, DIM)] * layers
    return paged_attention(shapes, 1024, 40, BLOCK, CUDA, torch.bfloat16, "flashinfer")


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (20, 0.0), (20, 1.5)])
def test_what_flashinfer_is_told_is_plain_attention(window: int, softcap: float) -> None:
    torch.manual_seed(0)
    options = Options(0.2, window, softcap)
    tables = [array("i", [7, 2, 30, 9]), array("i", [1, 0, 3]), array("i", [11])]
    rounds = [[40, 1, 9], [1, 20, 3], [17, 16, 1]]  # tokens of each text in each round
    texts = [[torch.randn(60, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)] for _ in range(3)]
    at = [0, 0, 0]
    with pretended():
        attention = ragged_attention()
        for lengths in rounds:
            begins = [sum(lengths[:i]) for i in range(3)]
            attention.begin([QueryRange(*each) for each in zip(begins, lengths, at, tables, strict=True)])
            new = [
                torch.cat([text[j][a : a + n] for text, a, n in zip(texts, at, lengths, strict=True)]) for j in range(3)
            ]
            result = attention.attend(*(x.to(CUDA) for x in new), 0, options).cpu().float()
            at = [a + n for a, n in zip(at, lengths, strict=True)]
            expected = [
                plain_attention(*(x[:a].float() for x in text), options)[-n:]
                for text, a, n in zip(texts, at, lengths, strict=True)
            ]
            torch.testing.assert_close(result, torch.cat(expected), atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("flashinfer")
def test_a_branch_has_what_is_copied_from_its_source() -> None:
    """In the pass that computes the token before it, too."""
    torch.manual_seed(0)
    options, table = Options(0.2), array("i", [7, 2])
    text = [torch.randn(24, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    with pretended():
        attention = ragged_attention()
        attention.begin([QueryRange(0, 20, 0, table)])
        attention.attend(*(x[:20].to(CUDA) for x in text), 0, options)
        attention.begin([QueryRange(0, 1, 20, table), QueryRange(1, 3, 21, array("i", [7, 4]), source=2)])
        result = attention.attend(*(x[20:].to(CUDA) for x in text), 0, options).cpu().float()
    expected = plain_attention(*(x.float() for x in text), options)[20:]
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("flashinfer")
def test_layers_that_attend_alike_share_a_plan_of_each_pass() -> None:
    with pretended():
        attention = ragged_attention(3)
        q, k = (torch.ones(1, heads, DIM, dtype=torch.bfloat16, device=CUDA) for heads in (HEADS, KV_HEADS))
        Wrapper.plans = 0
        for start in range(2):
            attention.begin([QueryRange(0, 1, start, array("i", [3]))])
            for layer, options in enumerate([Options(0.2), Options(0.2, 8), Options(0.2)]):
                attention.attend(q, k, k, layer, options)
        assert Wrapper.plans == 2 * 2
        with pytest.raises(NotImplementedError, match="sinks"):
            attention.attend(q, k, k, 0, Options(0.2, sinks=torch.ones(HEADS)))


def test_what_is_lacking_is_said_in_a_sentence() -> None:
    assert Settings(model="m").attention == "auto"
    assert problem(torch.device("cpu"), torch.bfloat16) == "flashinfer is for a GPU, and the device is cpu"
    assert problem(CUDA, torch.float32) == "flashinfer computes in 16 bits, not in float32"
    assert "flashinfer-python" in problem(CUDA, torch.bfloat16)
