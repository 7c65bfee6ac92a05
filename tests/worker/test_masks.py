"""How logits are masked, and the thread that makes masks beside the model's."""

import os
import queue
import sys
import threading

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_S
from worker_service.engine import hooks
from worker_service.engine.beside import Helper
from worker_service.engine.matcher import few_allowed
from worker_service.engine.types import Limits, Sampling


@given(data=st.data(), vocab=st.integers(1, 300), rows=st.integers(1, 3), share=st.sampled_from([0.0, 0.1, 0.9, 1.0]))
def test_what_is_not_allowed_is_cut_off(data: st.DataObject, vocab: int, rows: int, share: float) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    allowed = random.random((rows, vocab)) < share
    # A row of bits may be longer than one of logits, as the engine's are.
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, 40))), axis=1, bitorder="little")
    logits = torch.from_numpy(random.standard_normal((rows, vocab)).astype(np.float32))
    expected = torch.where(torch.from_numpy(allowed), logits, -torch.inf)
    context = hooks.LogitsContext((), (), 0, Sampling(), Limits(1), frozenset(), torch.from_numpy(bits))
    assert torch.equal(hooks._cut_with_torch(logits.clone(), torch.from_numpy(bits)), expected)
    assert torch.equal(hooks.follow_structure(logits.clone(), context), expected)


@given(data=st.data(), vocab=st.integers(1, 900), share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0]))
def test_few_tokens_are_all_that_a_mask_allows(data: st.DataObject, vocab: int, share: float) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    allowed = random.random((5, -(-vocab // 32) * 32 + 32)) < share  # a mask may be longer than the vocabulary
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    for row, some, few in zip(allowed, words, few_allowed(words, vocab), strict=True):
        assert (few is None) == (np.count_nonzero(some) > len(some) // 8)
        assert few is None or few.tolist() == np.flatnonzero(row[:vocab]).tolist()


def test_work_that_never_returns_gets_only_time_that_nobody_else_wants() -> None:
    """And what is begun next does not wait for it."""
    stuck, threads = threading.Event(), queue.SimpleQueue[int]()

    def hang() -> None:
        inner = threading.Thread(target=lambda: (threads.put(threading.get_native_id()), stuck.wait()))
        inner.start()  # as native code has threads of its own
        threads.put(threading.get_native_id())
        inner.join()

    helper = Helper()
    hanging = helper.begin(hang)
    hung = [threads.get(timeout=WAIT_S) for _ in range(2)]
    helper.abandon()
    try:
        assert Helper().begin(lambda: "done").result(WAIT_S) == "done"
        if sys.platform == "linux":
            assert [os.sched_getscheduler(thread) for thread in hung] == [os.SCHED_IDLE] * 2
            assert os.sched_getscheduler(0) != os.SCHED_IDLE
    finally:
        stuck.set()
    assert hanging.result(WAIT_S) is None
