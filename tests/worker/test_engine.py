"""How requests end in the engine, and what it does when memory or a request is bad."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.worker.harness import Driver, Tiny
from tests.worker.test_drafters import head_drafter
from worker_service.engine.drafting.drafter import Price
from worker_service.engine.types import Admission, Finish, Limits, Run, Sampling, Skip, StepResult
from worker_service.engine.warm_up import measure

SAMPLED = Sampling(temperature=1.0, seed=11)


def run_one(tiny: Tiny, limits: Limits, prompt: str = "The quick brown fox", sampling: Sampling = SAMPLED) -> Driver:
    driver = Driver(tiny.engine())
    driver.admit("r", tiny.prompt(prompt), limits, sampling)
    driver.finish_all()
    return driver


def free_text(tiny: Tiny, tokens: int = 24) -> list[int]:
    return run_one(tiny, Limits(max_tokens=tokens, ignore_eos=True)).outputs["r"]


def eos_engine(tiny: Tiny, eos: int) -> Driver:
    return Driver(tiny.engine(eos_ids=frozenset({eos})))


def test_max_tokens_ends_with_length(tiny: Tiny) -> None:
    driver = run_one(tiny, Limits(max_tokens=5, ignore_eos=True))
    assert len(driver.outputs["r"]) == 5
    assert driver.finished["r"] is Finish.LENGTH


def test_the_models_context_ends_with_length(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(context_tokens=20))
    prompt = tiny.prompt("dog")
    driver.admit("r", prompt, Limits(max_tokens=500, ignore_eos=True))
    driver.finish_all()
    assert len(prompt) + len(driver.outputs["r"]) == 20
    assert driver.finished["r"] is Finish.LENGTH


def test_eos_is_the_last_token(tiny: Tiny) -> None:
    text = free_text(tiny)
    driver = eos_engine(tiny, text[6])
    driver.admit("r", tiny.prompt("The quick brown fox"), Limits(max_tokens=24), SAMPLED)
    driver.finish_all()
    assert driver.outputs["r"] == text[: text.index(text[6]) + 1]
    assert driver.finished["r"] is Finish.STOP


def test_ignore_eos_goes_on_after_it(tiny: Tiny) -> None:
    text = free_text(tiny)
    driver = eos_engine(tiny, text[6])
    driver.admit("r", tiny.prompt("The quick brown fox"), Limits(max_tokens=24, ignore_eos=True), SAMPLED)
    driver.finish_all()
    assert driver.outputs["r"] == text


def test_min_tokens_keeps_eos_from_being_drawn(tiny: Tiny) -> None:
    text = free_text(tiny)
    driver = eos_engine(tiny, text[2])
    driver.admit("r", tiny.prompt("The quick brown fox"), Limits(max_tokens=12, min_tokens=9), SAMPLED)
    driver.finish_all()
    assert len(driver.outputs["r"]) > 9
    assert text[2] not in driver.outputs["r"][:9]


@pytest.mark.parametrize("draft_len", [0, 6])
def test_a_stop_string_across_token_borders_ends_with_the_token_that_completes_it(tiny: Tiny, draft_len: int) -> None:
    tokens = free_text(tiny)
    piece = [tiny.tokenizer.decode([token]) for token in tokens]
    at = next(i for i in range(4, 20) if all(p.isascii() and p for p in piece[i : i + 2]))
    stop = piece[at][-1] + piece[at + 1][:1]
    first = next(i for i in range(1, 25) if stop in tiny.tokenizer.decode(tokens[:i]))

    driver = Driver(tiny.engine())
    driver.admit("r", tiny.prompt("The quick brown fox"), Limits(24, stop=("never", stop), ignore_eos=True), SAMPLED)
    driver.finish_all(draft_len=lambda _: draft_len)
    assert driver.outputs["r"] == tokens[:first]
    assert driver.finished["r"] is Finish.STOP


def test_a_stop_string_before_min_tokens_does_not_count(tiny: Tiny) -> None:
    tokens = free_text(tiny)
    texts = [tiny.tokenizer.decode([token]) for token in tokens]
    once = next(t for i, t in enumerate(texts) if i < 10 and t.isascii() and t and "".join(texts).count(t) == 1)
    driver = run_one(tiny, Limits(24, min_tokens=12, stop=(once,), ignore_eos=True))
    assert driver.outputs["r"] == tokens


def test_a_stop_string_is_found_after_the_request_came_back(tiny: Tiny) -> None:
    tokens = free_text(tiny)
    piece = [tiny.tokenizer.decode([token]) for token in tokens]
    at = next(i for i in range(4, 20) if all(p.isascii() and p for p in piece[i : i + 2]))
    stop = piece[at][-1] + piece[at + 1][:1]
    whole = run_one(tiny, Limits(24, stop=(stop,), ignore_eos=True))
    length = len(whole.outputs["r"])
    whole.readmit("r", length - 1, placement=2)
    whole.finish_all()
    assert len(whole.outputs["r"]) == length
    assert whole.finished["r"] is Finish.STOP


def test_the_lowest_ranked_waits_when_blocks_run_out(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(blocks=4, block_tokens=4))
    for name in ("first", "second"):
        driver.admit(name, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], Limits(max_tokens=2, ignore_eos=True))
    ranking = [Run("first", 0, 64), Run("second", 0, 64)]
    first, second = driver.step(ranking)
    assert (first.skipped, second.skipped) == (None, None)  # the second computes as much as there is place for
    assert (second.prefilled, second.num_uncomputed) == (4, 6)
    rows = {row.request_id: row for row in driver.step(ranking)}
    assert rows["first"].finish is Finish.LENGTH
    assert rows["second"].skipped is Skip.NO_BLOCKS
    driver.finish_all()
    assert driver.finished["second"] is Finish.LENGTH


def test_ranked_below_a_skipped_one_nobody_takes_blocks(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(blocks=2, block_tokens=4))
    driver.admit("holder", [5, 6, 7, 8], Limits(max_tokens=9, ignore_eos=True))
    driver.admit("full", [5, 6, 7, 8], Limits(max_tokens=9, ignore_eos=True))
    driver.step([Run("full", 0, 4), Run("holder", 0, 3)])
    driver.admit("new", [5], Limits(max_tokens=9, ignore_eos=True))
    rows = driver.step([Run("full", 0, 4), Run("new", 0, 4), Run("holder", 0, 4)])
    assert [row.skipped for row in rows] == [Skip.NO_BLOCKS, Skip.NO_BLOCKS, None]


def test_ranked_below_a_skipped_one_offloaded_kv_does_not_come_back(tiny: Tiny) -> None:
    """Else a stream of small requests would keep a large one from ever having room."""
    driver = Driver(tiny.engine(blocks=6, block_tokens=8, host_blocks=9))
    for name, tokens in (("large", 40), ("small", 9)):
        prefill_all(driver, name, list(range(20, 20 + tokens)))
        driver.engine.offload(name)
    prefill_all(driver, "holder", list(range(80, 95)))
    rows = driver.step([Run("large", 0, 99), Run("small", 0, 99)])
    assert [row.skipped for row in rows] == [Skip.NO_BLOCKS, Skip.NO_BLOCKS]


def test_slots_bound_a_round_and_the_finished_leave_their_place(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    for name in "abc":
        driver.admit(name, tiny.prompt("dog"), Limits(max_tokens=1 if name == "a" else 9, ignore_eos=True))
    ranking = [Run(name, 0, 64) for name in "abc"]
    assert [row.request_id for row in driver.step(ranking, slots=2)] == ["a", "b"]
    assert [row.request_id for row in driver.step(ranking, slots=2)] == ["b", "c"]


def test_a_long_prompt_is_computed_in_chunks_and_its_first_token_comes_with_the_last(tiny: Tiny) -> None:
    driver = Driver(tiny.engine())
    driver.admit("r", list(range(10, 20)), Limits(max_tokens=9, ignore_eos=True))
    rows = [driver.step([Run("r", 4, 4)])[0] for _ in range(3)]
    assert [(row.prefilled, row.num_uncomputed, len(row.tokens), row.drafted) for row in rows] == [
        (4, 6, 0, 0),
        (4, 2, 0, 0),
        (2, 0, 1, 0),
    ]


def test_a_request_that_lost_its_kv_owes_all_but_its_last_token(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=16))  # no block is full: nothing to share, not even with itself
    driver.admit("r", list(range(10, 20)), Limits(max_tokens=9, ignore_eos=True))
    driver.step([Run("r", 0, 64)])
    driver.engine.drop("r")
    row = driver.step([Run("r", 0, 6)])[0]
    assert (row.prefilled, row.num_uncomputed, row.tokens) == (6, 4, ())


@pytest.mark.parametrize(
    ("tokens", "prompt_len", "problem"),
    [([3, 99_999], 2, "99999"), ([], 0, "prompt"), ([3], 2, "prompt"), ([3] * 1024, 1024, "context")],
)
def test_a_bad_request_fails_alone(tiny: Tiny, tokens: list[int], prompt_len: int, problem: str) -> None:
    driver = Driver(tiny.engine())
    driver.admit("good", tiny.prompt("dog"), Limits(max_tokens=4))
    driver.outputs["bad"] = []
    driver.engine.admit(Admission("bad", 1, tokens, prompt_len, Sampling(), Limits(max_tokens=4)))
    rows = {row.request_id: row for row in driver.step([Run("bad", 0, 9), Run("good", 0, 9)], slots=1)}
    assert rows["bad"].finish is Finish.ERROR
    assert problem in rows["bad"].error
    assert rows["good"].tokens


def test_warm_up_verifies_as_many_drafts_as_are_asked_for_however_unsure_the_drafter_is(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, drafted = tiny.engine(blocks=200, drafter=head_drafter(tiny, Price(1.1))), []
    step = engine.step

    def noted(*arguments: Any) -> StepResult:
        result = step(*arguments)
        drafted.append(sum(row.drafted for row in result.rows))
        return result

    monkeypatch.setattr(engine, "step", noted)
    measure(engine, slots=4)
    assert drafted.count(4 * 4) == 6  # three that warm up, and three that are timed


def test_warm_up_measures_all_costs_and_leaves_nothing(tiny: Tiny) -> None:
    engine = tiny.engine(blocks=64, host_blocks=4)
    cost = measure(engine, slots=4).profile
    assert min(cost.draft_s, cost.verify_s, cost.prefill_token_s, cost.offload_block_s) > 0
    assert cost.verify_slope_s >= 0
    assert not engine.held()
    assert engine.free_blocks == engine.blocks


def prefill_all(driver: Driver, name: str, prompt: list[int], salt: str = "") -> int:
    """Admit and compute the whole prompt; returns how many of its tokens had to be computed."""
    driver.outputs[name] = []
    limits = Limits(max_tokens=40, ignore_eos=True)
    driver.engine.admit(Admission(name, 1, prompt, len(prompt), Sampling(), limits, salt))
    return driver.step([Run(name, 0, 1000)])[0].prefilled


def test_what_prompts_begin_with_is_computed_once(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=8))
    head = list(range(20, 40))
    assert prefill_all(driver, "first", [*head, 50, 51]) == 22
    assert prefill_all(driver, "second", [*head, 60, 61]) == 6  # two full blocks of the head are shared
    assert prefill_all(driver, "same", head[:16]) == 8  # the last token is computed in any case
    shared, own = 2, 1
    assert driver.engine.blocks - driver.engine.free_blocks == shared + 3 * own


def test_a_shared_block_is_private_again_when_the_others_are_gone(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=8))
    head = list(range(20, 36))
    prefill_all(driver, "first", [*head, 50])
    prefill_all(driver, "second", [*head, 60])
    assert driver.step([Run("second", 0, 0)])[0].blocks == 1
    driver.engine.forget("first")
    assert driver.step([Run("second", 0, 0)])[0].blocks == 3


def test_tenants_share_nothing(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=8))
    prompt = list(range(20, 40))
    assert prefill_all(driver, "mine", prompt, "a") == 20
    assert prefill_all(driver, "theirs", prompt, "b") == 20
    assert prefill_all(driver, "mine too", prompt, "a") == 4


def test_a_finished_text_is_kept_until_its_place_is_needed(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(blocks=4, block_tokens=8))
    prompt = list(range(20, 40))
    prefill_all(driver, "old", prompt)
    driver.engine.forget("old")
    assert driver.engine.free_blocks == 4
    assert prefill_all(driver, "again", prompt) == 4
    driver.engine.forget("again")
    assert prefill_all(driver, "other", list(range(50, 80))) == 30  # takes all the memory
    driver.engine.forget("other")
    assert prefill_all(driver, "last", prompt) == 20


def test_a_shared_text_that_goes_another_way_does_not_change_for_the_others(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=8))
    prompt = list(range(20, 44))
    prefill_all(driver, "first", prompt)
    prefill_all(driver, "second", prompt)
    memory, table = driver.engine.target._memory, list(driver.engine._requests["first"].kv.table[:3])
    before = [layer[:, table].clone() for layer in memory._data]
    prefill_all(driver, "second", [*prompt[:12], *range(60, 72)])  # leaves the first's text inside its second block
    assert all(torch.equal(own, layer[:, table]) for own, layer in zip(before, memory._data, strict=True))


def test_offloaded_kv_comes_back_and_is_not_computed_again(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=64, host_blocks=1))  # no block is full: nothing is left to be shared
    prefill_all(driver, "r", list(range(20, 40)))
    driver.engine.offload("r")
    assert driver.engine.free_blocks == driver.engine.blocks
    row = driver.step([Run("r", 0, 0)])[0]
    assert (row.prefilled, len(row.tokens), row.blocks) == (0, 1, 1)


def test_with_the_hosts_memory_full_offloading_is_dropping(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=64, host_blocks=1))
    for name in ("first", "second"):
        prefill_all(driver, name, list(range(20, 40)))
        driver.engine.offload(name)
    assert driver.step([Run("second", 0, 99)])[0].prefilled == 20
    assert driver.step([Run("first", 0, 99)])[0].prefilled == 0


def test_offloaded_kv_survives_another_placement_and_is_cut_to_the_tokens_that_count(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=64, host_blocks=1))
    prompt = list(range(20, 40))
    prefill_all(driver, "r", prompt)
    driver.engine.offload("r")
    assert driver.engine.held()[0].offloaded == 1
    for tokens, computed in ((prompt, 1), ([*prompt[:12], *range(60, 68)], 8)):  # the last token is, in any case
        limits = Limits(max_tokens=9, ignore_eos=True)
        driver.engine.admit(Admission("r", 2, tokens, len(tokens), Sampling(), limits))
        assert driver.engine.held()[0].num_uncomputed == computed
    driver.outputs["r"] = []
    assert driver.step([Run("r", 0, 99)])[0].prefilled == 8


def test_offloading_gives_back_the_blocks_of_kv_that_no_longer_counts(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(blocks=4, host_blocks=4))
    driver.admit("r", tiny.prompt("A short request overtakes"), Limits(max_tokens=20), Sampling(prompt_logprobs=0))
    driver.step([Run("r", 4, 64)])
    driver.readmit("r", 0)  # its prompt is to be scored anew
    driver.engine.offload("r")
    assert driver.engine.free_blocks == 4
    assert driver.engine.held()[0].offloaded == 0


def test_of_offloaded_kv_what_others_still_hold_is_shared_again(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(block_tokens=8, host_blocks=9))
    head = list(range(20, 36))
    prefill_all(driver, "other", [*head, 50])
    prefill_all(driver, "r", [*head, 60])
    driver.engine.offload("r")
    assert driver.step([Run("r", 0, 0)])[0].blocks == 1
    assert driver.engine.blocks - driver.engine.free_blocks == 2 + 1 + 1


def test_a_text_goes_on_alike_where_its_kv_was_shared_in_part_and_brought_back_in_part(tiny: Tiny) -> None:
    """The first two of its blocks are another's, the third is still where it was; the last one comes from the host."""
    head, restored, outputs = list(range(20, 36)), list[tuple[int, int]](), []
    for disturbed in (False, True):
        driver = Driver(tiny.engine(block_tokens=8, host_blocks=9))
        prefill_all(driver, "other", [*head, 50])
        prefill_all(driver, "r", [*head, *range(60, 75)])
        if disturbed:
            restore = driver.engine.target.restore

            def noted(name: str, first: int, table: Sequence[int], restore: Any = restore) -> None:
                restored.append((first, len(table)))
                restore(name, first, table)

            driver.engine.offload("r")
            with patch.object(driver.engine.target, "restore", noted):
                driver.step([Run("r", 0, 0)])
        for _ in range(12):
            driver.step([Run("r", 0, 9), Run("other", 0, 9)])
        outputs.append({name: tokens[:12] for name, tokens in driver.outputs.items()})
    assert restored == [(3, 1)]
    assert outputs[0] == outputs[1]


def test_offloaded_kv_waits_until_there_is_place_for_it(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(blocks=2, block_tokens=16, host_blocks=2))
    prefill_all(driver, "r", list(range(20, 40)))
    driver.engine.offload("r")
    prefill_all(driver, "other", list(range(50, 60)))
    assert driver.step([Run("r", 0, 9)])[0].skipped is Skip.NO_BLOCKS
    driver.engine.forget("other")
    assert driver.step([Run("r", 0, 9)])[0].tokens


def test_the_prefill_of_a_round_is_bounded_and_the_best_come_first(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(max_prefill=24))
    driver.admit("runs", [5, 6], Limits(max_tokens=9, ignore_eos=True))
    driver.step([Run("runs", 0, 9)])
    for name in ("first", "second", "third"):
        driver.admit(name, [ord(name[0])] * 20, Limits(max_tokens=9, ignore_eos=True))
    ranking = [Run(name, 0, 1000) for name in ("first", "second", "third", "runs")]
    assert {row.request_id: row.prefilled for row in driver.step(ranking)} == {"first": 20, "second": 4, "runs": 0}


def test_one_for_whom_no_prefill_is_left_takes_no_blocks(tiny: Tiny) -> None:
    """It could share those of a prompt like its own. Without a row nobody would learn that it holds them."""
    driver = Driver(tiny.engine(max_prefill=16))
    text = list(range(20, 60))
    prefill_all(driver, "before", text)
    driver.engine.forget("before")
    driver.admit("long", list(range(60, 100)), Limits(max_tokens=2))
    driver.admit("shares", text, Limits(max_tokens=2))
    (row,) = driver.step([Run("long", 0, 64), Run("shares", 0, 64)])
    assert row.request_id == "long"
    assert driver.engine.blocks - driver.engine.free_blocks == row.blocks


def test_rounds_go_on_while_another_model_is_loaded_in_bfloat16(tiny: Tiny) -> None:
    def run() -> list[int]:
        driver = Driver(tiny.engine(block_tokens=16))
        driver.admit("r", tiny.prompt("The quick"), Limits(max_tokens=12), Sampling(logit_bias=((70, 1.001),)))
        torch.set_default_dtype(number)  # transformers does so while it loads, for all threads
        try:
            driver.finish_all()
        finally:
            torch.set_default_dtype(torch.float32)
        return driver.outputs["r"]

    number = torch.float32
    expected = run()
    number = torch.bfloat16
    assert run() == expected
