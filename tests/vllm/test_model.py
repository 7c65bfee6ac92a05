"""The real model in vLLM on the CPU, in float32, whatever drafts: pauses, drops and aborts at random change no text."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from laps_sd_vllm.directed import Desired, Place, StepDone
from tests.vllm import eagle_head
from tests.vllm.drive import MODEL, add, make_core, run_all, step

pytestmark = [
    pytest.mark.vllm_model,
    pytest.mark.timeout(14_400),
    pytest.mark.skipif(not MODEL.exists(), reason="the model is not there: laps-sd pull smollm2-135m"),
]

DRAFTS = 4
SLOTS = 4
STAGE = "tests.vllm.stages.Stage"
TEXTS = [
    "Repeat after me: one two three four, one two three four, one two three four,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "The capital of France is",
    "Once upon a time there was a little girl who lived in a village near the forest.",
    "List ten animals: 1. dog 2. cat 3.",
    "Translate to French: The cat sat on the mat. The cat sat on the mat. The cat",
    "Explain photosynthesis in simple words.",
    "A B C D E F G A B C D E F G A B C",
    '{"name": "x", "value": 1}, {"name": "y", "value": 2}, {"name":',
    "The quick brown fox",
]
LENGTHS = [30, 25, 15, 30, 20, 25, 22, 30, 25, 18, 20, 15]


@pytest.fixture(scope="module", params=["ngram", "draft_model", "eagle", "two stages"])
def core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The model that drafts is the model itself, so that nearly all is accepted; of EAGLE's head nearly nothing is."""
    stages = request.param.startswith("two stages")
    method = request.param.removeprefix("two stages").removeprefix(", ")
    given: dict[str, Any] = {}
    told: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "ngram":
        told |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    elif method == "draft_model":
        told["model"] = str(MODEL)
    elif method == "eagle":
        told["model"] = str(eagle_head.made(MODEL, tmp_path_factory.mktemp("head")))
    if stages:
        given = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "worker_cls": STAGE}
    if method:
        given["speculative_config"] = told
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0" if stages else "0")
        made = make_core(
            "laps_sd_vllm.directed.DirectedScheduler", max_num_batched_tokens=64, max_num_seqs=16, block_size=32,
            blocks=200, **given,
        )  # fmt: skip
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twelve; the last two take several chunks, and share their beginning."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    together = tokenizer(" ".join(TEXTS))["input_ids"]
    return [*prompts, together + together, [*together, *reversed(together)]]


@pytest.fixture(scope="module")
def undisturbed(core: Any, prompts: list[list[int]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        add(core, f"undisturbed{number}", prompt, LENGTHS[number])
    texts = run_all(core)
    return [texts[f"undisturbed{number}"] for number in range(len(prompts))]


def test_the_text_of_disturbed_requests_is_the_undisturbed_one(
    core: Any, prompts: list[list[int]], undisturbed: list[list[int]], did: Counter[str]
) -> None:
    """Acceptance, too, is what vLLM itself counts."""
    scheduler, rng = core.scheduler, random.Random(1)
    free, counted = scheduler.free_blocks, dict[tuple[str, int], tuple[int, int]]()
    own = type(scheduler).make_spec_decoding_stats

    def count(*args: Any, **told: Any) -> Any:
        id = told["request_id"]
        drafted, accepted = told["num_draft_tokens"], told["num_accepted_tokens"]
        counted[id, scheduler.requests[id].num_output_tokens] = drafted, accepted
        return own(scheduler, *args, **told)

    scheduler.make_spec_decoding_stats = count
    done: list[StepDone] = []
    scheduler.on_step = done.append
    live = {f"d{number}": number for number in range(len(prompts))}
    texts: dict[str, list[int]] = {id: [] for id in live}
    for id, number in live.items():
        add(core, id, prompts[number], LENGTHS[number])
    while live:
        ids = sorted(live)
        rng.shuffle(ids)
        listed = ids[: rng.randint(1, len(ids))]
        scheduler.desired = Desired([Place(id, rng.randint(0, DRAFTS)) for id in listed], SLOTS)
        if rng.random() < 0.3:
            victim = rng.choice(ids)
            did["drops"] += bool(scheduler.requests[victim].num_computed_tokens)
            scheduler.drop(victim)
        for id, (tokens, ended) in step(core).items():
            texts[id] += tokens
            if ended:
                del live[id]
        running, _ = scheduler.get_request_counts()
        did["pauses"] += len(scheduler.running) - running
    run_all(core)
    del scheduler.make_spec_decoding_stats
    scheduler.desired = None
    rows = [row for one in done for row in one.rows if not row.evicted]
    did["steps"] += len(done)
    assert list(texts.values()) == undisturbed
    assert max(sum(not row.evicted for row in one.rows) for one in done) <= SLOTS
    assert scheduler.free_blocks == free
    verified = [row for row in rows if row.drafted]
    assert len(verified) > 10 or not scheduler.num_spec_tokens
    for row in verified:
        drafted, accepted = counted[row.request_id, row.start]  # vLLM counts those beyond the end of a text, too
        assert (row.drafted, row.accepted) == (drafted, min(accepted, len(row.tokens)))


def test_aborted_requests_give_all_back(core: Any, prompts: list[list[int]]) -> None:
    scheduler = core.scheduler
    free = scheduler.free_blocks
    ids = [f"a{number}" for number in range(6)]
    for number, id in enumerate(ids):
        add(core, id, prompts[number], 30)
    scheduler.desired = Desired([Place(id) for id in ids[:4]], 4)
    for _ in range(3):
        step(core)
    scheduler.desired = Desired([Place(id) for id in ids[:2]], 4)
    step(core)
    core.abort_requests(ids)
    run_all(core)
    scheduler.desired = None
    assert (scheduler.free_blocks, len(scheduler.requests)) == (free, 0)
