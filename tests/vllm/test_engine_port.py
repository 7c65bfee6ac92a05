"""vLLM as a worker's engine, on the toy executor: what runner and scheduler rely on holds as it does with our own."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from transformers import AutoTokenizer
from vllm.config import VllmConfig

from tests.vllm.drive import MODEL
from tests.vllm.toy import ToyExecutor, continued
from worker_service.engine.types import Admission, Finish, Limits, Row, Run, Sampling, Skip
from worker_service.engine.warm_up import measure
from worker_service.identity import fingerprint
from worker_service.model_files import ModelError
from worker_service.vllm_engine.config import Settings
from worker_service.vllm_engine.engine import VllmEngine
from worker_service.vllm_engine.model import Configured, configure

BLOCK_TOKENS = 16
LENGTH = 40
TWO_STAGES = {"pipeline_parallel_size": 2, "worker_cls": "tests.vllm.stages.Stage"}
STAGES: dict[str, Any] = {"drafter": "none", "vllm_args": TWO_STAGES}


def configured(**told: Any) -> Configured:
    args = {
        "distributed_executor_backend": ToyExecutor,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_num_batched_tokens": 128,
    } | told.pop("vllm_args", {})
    given = {"model": str(MODEL), "dtype": "float32", "slots": 2, "max_draft": 4, "kv_tokens": 1600} | told
    return configure(Settings(**given, vllm_args=args))


def engine(*, asynchronous: bool = False, v2: pytest.MonkeyPatch | None = None, **told: Any) -> VllmEngine:
    """`asynchronous` and `v2` are set behind vLLM's back: its CPU platform allows neither with a model."""
    of = configured(**told)
    of.config.scheduler_config.async_scheduling |= asynchronous
    if v2 is not None:
        v2.setattr(VllmConfig, "use_v2_model_runner", True)
    made = VllmEngine(
        of.config,
        of.model.tokenizer.backend_tokenizer,
        eos_ids=of.model.eos_ids,
        max_draft=of.max_draft,
        refused=dict(of.model.refused),
    )
    made.bind_thread(0)
    return made


@pytest.fixture(scope="module")
def toy() -> Iterator[VllmEngine]:
    made = engine()
    yield made
    made.close()


@dataclass
class Play:
    """A scheduler for one engine. It checks every row."""

    engine: VllmEngine
    texts: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Row] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)  # in the last step
    did: Counter[str] = field(default_factory=Counter)
    late: bool = False  # results may be those of an earlier schedule

    def admit(self, name: str, prompt: list[int], limits: Limits, sampling: Sampling | None = None) -> None:
        self.prompts[name], self.texts[name] = prompt, []
        self._admit(name, 1, limits, sampling)

    def again(self, name: str, tokens: int, limits: Limits) -> None:
        """Admit it once more, with so many of its tokens: the others never became durable."""
        self.texts[name] = self.texts[name][:tokens]
        self._admit(name, 2, limits, None)

    def _admit(self, name: str, placement: int, limits: Limits, sampling: Sampling | None) -> None:
        prompt = self.prompts[name]
        tokens = [*prompt, *self.texts[name]]
        self.engine.admit(Admission(name, placement, tokens, len(prompt), sampling or Sampling(), limits, salt="t"))

    @property
    def live(self) -> list[str]:
        return [name for name in self.prompts if name not in self.ended]

    def step(self, runs: list[Run], slots: int = 2) -> list[Row]:
        bounds = {run.request_id: run for run in runs}
        result = self.engine.step(runs, slots)
        assert sum(row.skipped is None for row in result.rows) <= slots
        for row in result.rows:
            assert row.start == len(self.texts[row.request_id])
            if row.request_id not in bounds and not self.late:  # paused, and vLLM took its KV for another
                assert (row.skipped, row.blocks, row.tokens) == (Skip.NO_BLOCKS, 0, ())
                continue
            assert row.accepted <= min(row.drafted, len(row.tokens))
            if not self.late:
                assert row.drafted <= bounds[row.request_id].draft_len
                assert row.prefilled <= bounds[row.request_id].prefill_tokens or len(result.ran) == 1
            self.texts[row.request_id] += row.tokens
            if row.finish:
                self.ended[row.request_id] = row
        ran = {row.request_id for row in result.ran}
        self.did.update(steps=1, tokens=sum(len(row.tokens) for row in result.rows))
        self.did["evicted"] += sum(row.skipped is Skip.NO_BLOCKS and not row.blocks for row in result.rows)
        self.did["skipped"] += sum(row.skipped is Skip.NO_BLOCKS for row in result.rows)
        self.did["prefilled"] += sum(row.prefilled for row in result.rows)
        self.did["drafted"] += sum(row.drafted for row in result.rows)
        self.did["pauses"] += len((self.ran & set(self.live)) - ran)
        self.ran = ran
        return list(result.rows)

    def finish(self) -> None:
        """As a runner does: it waits for another schedule where nobody is runnable, or ran in the step before."""
        waits: list[Run] = []
        for _ in range(2000):
            if not (live := self.live):
                return
            schedule = [Run(name, 4, 64) for name in live]
            assert schedule != waits, "nobody ran, and another schedule would never come"
            assert any(map(self.engine.runnable, schedule)), "nobody is runnable"
            self.step(schedule)
            waits = [] if self.ran else schedule
        raise AssertionError(f"never finished: {self.live}")

    def forget_all(self) -> None:
        for name in self.prompts:
            self.engine.forget(name)
        assert self.engine.free_blocks == self.engine.blocks
        assert self.engine.held() == []


def prompts(number: int, seed: int = 1) -> dict[str, list[int]]:
    random = Random(seed)
    return {f"r{i}": [random.randrange(600, 1000) for _ in range(random.randint(3, 150))] for i in range(number)}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"drafter": "none"},
        {"kv_tokens": 320},
        {"vllm_args": {"max_num_batched_tokens": 32}},
        {"asynchronous": True},
        {"asynchronous": True, "v2": True},
        {"v2": True, "kv_tokens": 640},
        {"asynchronous": True, "kv_tokens": 320},
        {"asynchronous": True, "v2": True, "kv_tokens": 640},
        STAGES,
    ],
    ids=[
        "drafts",
        "no drafts",
        "little memory",
        "small batches",
        "asynchronous",
        "asynchronous V2",
        "V2",
        "asynchronous, little memory",
        "asynchronous V2, little memory",
        "two stages",
    ],
)
def test_whatever_is_paused_dropped_or_admitted_again_the_text_is_the_undisturbed_one(
    told: dict[str, Any], did: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(**(told | {"v2": monkeypatch} if "v2" in told else told))
    late = "asynchronous" in told or told.get("vllm_args") == TWO_STAGES
    play, random, limits = Play(made, late=late), Random(7), Limits(LENGTH, ignore_eos=True)
    for name, prompt in prompts(8).items():
        play.admit(name, prompt, limits)
    for _ in range(600):
        if not (live := play.live):
            break
        order = random.sample(live, random.randint(1, len(live)))
        play.step([Run(name, random.randint(0, 6), random.choice([0, 8, 16, 64])) for name in order])
        match random.choice(["step"] * 8 + ["drop", "again"]):
            case "drop":
                victim = random.choice(order)
                play.engine.drop(victim)
                play.did["drops"] += 1
            case "again" if still := [name for name in order if name not in play.ended]:
                victim = random.choice(still)
                play.again(victim, random.randint(0, len(play.texts[victim])), limits)
                play.did["admitted again"] += 1
    play.finish()
    assert play.texts == {name: continued(prompt, LENGTH) for name, prompt in play.prompts.items()}
    assert play.did["pauses"] > 20
    assert play.did["drops"] > 2
    assert play.did["admitted again"] > 2
    assert bool(play.did["drafted"]) == (told.get("drafter") != "none")
    did.update(play.did)
    play.forget_all()
    play.engine.close()


@pytest.mark.parametrize(
    "told",
    [{"asynchronous": True}, {"asynchronous": True, "v2": True}, STAGES, STAGES | {"asynchronous": True, "v2": True}],
    ids=["asynchronous", "asynchronous V2", "two stages", "two stages, asynchronous V2"],
)
def test_where_vllm_works_on_several_batches_a_runner_waits_for_nothing_that_is_under_way(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(**({"drafter": "none"} | told | ({"v2": monkeypatch} if "v2" in told else {})))
    play = Play(made, late=True)
    for number, together in enumerate((["a"], ["b"], ["c", "d", "e"])):
        for name in together:
            play.admit(name, [700 + number] * 150, Limits(LENGTH, ignore_eos=True))
        play.finish()
    assert play.texts == {name: continued(prompt, LENGTH) for name, prompt in play.prompts.items()}
    assert not play.did["skipped"]
    play.forget_all()
    made.close()


def test_who_waits_for_its_turn_in_a_pipeline_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    told = STAGES | {"vllm_args": TWO_STAGES | {"max_num_seqs": 2}}
    play = Play(engine(asynchronous=True, v2=monkeypatch, **told), late=True)
    for name in "abcd":
        play.admit(name, [8 + ord(name)] * 20, Limits(LENGTH, ignore_eos=True))
    play.finish()
    assert play.texts == {name: continued(prompt, LENGTH) for name, prompt in play.prompts.items()}
    assert play.did["prefilled"] == 4 * 20
    play.forget_all()
    play.engine.close()


def test_who_is_under_way_in_a_pipeline_is_not_taken_for_preempted() -> None:
    play, limits = Play(engine(slots=3, **STAGES), late=True), Limits(LENGTH, ignore_eos=True)
    for name in ("a", "b"):
        play.admit(name, [8 + ord(name)] * 20, limits)
    while not all(play.texts.values()):
        play.step([Run(name, 0, 64) for name in play.live], slots=3)
    play.admit("c", [9] * 200, limits)  # several batches compute its prompt, and it is in some of them alone
    while live := play.live:
        begun = {name for name in live if play.texts[name]}
        rows = play.step([Run(name, 0, 64) for name in live], slots=3)
        assert begun <= {row.request_id for row in rows if row.skipped in (None, Skip.DEFERRED)}
    assert play.texts == {name: continued(prompt, LENGTH) for name, prompt in play.prompts.items()}
    play.forget_all()
    play.engine.close()


def test_a_reconnect_with_all_tokens_computes_nothing_again(toy: VllmEngine) -> None:
    play, limits = Play(toy), Limits(LENGTH, ignore_eos=True)
    play.admit("a", [7] * 50, limits)
    for _ in range(3):
        play.step([Run("a", 2, 64)])
    held = {each.request_id: each for each in toy.held()}["a"]
    assert (held.output_tokens, held.num_uncomputed) == (len(play.texts["a"]), 0)
    assert held.blocks > 0
    play.again("a", len(play.texts["a"]), limits)
    (row,) = play.step([Run("a", 2, 64)])
    assert (row.placement, row.prefilled) == (2, 0)
    play.forget_all()


def test_who_may_not_prefill_waits_and_who_needs_not_runs(toy: VllmEngine) -> None:
    play, limits = Play(toy), Limits(LENGTH, ignore_eos=True)
    play.admit("a", [7] * 50, limits)
    assert not toy.runnable(Run("a", 4, 0))
    play.step([Run("a", 0, 64)])
    play.step([Run("a", 0, 64)])
    assert toy.runnable(Run("a", 4, 0))
    assert not toy.runnable(Run("nobody", 4, 64))
    play.forget_all()


def test_memory_that_is_full_is_told_and_the_first_goes_on() -> None:
    play, limits = Play(engine(kv_tokens=192)), Limits(100, ignore_eos=True)
    for name in ("a", "b"):
        play.admit(name, [8 + ord(name)] * 64, limits)
    skips = []
    for _ in range(300):
        if "a" in play.ended:
            break
        skips += [
            row.request_id for row in play.step([Run(n, 0, 64) for n in play.live]) if row.skipped is Skip.NO_BLOCKS
        ]
    assert "a" in play.ended
    assert set(skips) == {"b"}
    play.finish()
    assert play.texts == {name: continued(prompt, 100) for name, prompt in play.prompts.items()}
    play.forget_all()
    play.engine.close()


def test_a_stop_string_ends_a_request_in_the_step_that_completes_it(toy: VllmEngine) -> None:
    prompt = [7] * 20
    text = continued(prompt, LENGTH)
    word = toy._tokenizer.decode(text[9:11])
    play = Play(toy)
    play.admit("a", prompt, Limits(LENGTH, ignore_eos=True, stop=(word,)))
    play.admit("full", prompt, Limits(11, ignore_eos=True, stop=(word,)))  # its last token completes it
    play.admit("late", prompt, Limits(LENGTH, min_tokens=20, ignore_eos=True, stop=(word,)))
    play.finish()
    for name in ("a", "full"):
        assert (play.texts[name], play.ended[name].finish) == (text[:11], Finish.STOP)
    assert (play.texts["late"], play.ended["late"].finish) == (text, Finish.LENGTH)
    play.forget_all()


def test_an_end_id_ends_a_request_but_not_before_its_least_tokens_and_not_if_ignored(toy: VllmEngine) -> None:
    prompt = [7] * 20
    text = continued(prompt, LENGTH)
    play, toy._eos_ids = Play(toy), frozenset({text[9]})
    play.admit("a", prompt, Limits(LENGTH))
    play.admit("on", prompt, Limits(LENGTH, ignore_eos=True))
    play.finish()
    assert (play.texts["a"], play.ended["a"].finish) == (text[:10], Finish.STOP)
    assert play.texts["on"] == text
    play.forget_all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": [10**8]}, "tokens: 100000000 is not in the vocabulary"),
        ({"tokens": [1] * 1600, "prompt_len": 1600}, "tokens: a prompt of 1600 leaves no place"),
        ({"sampling": Sampling(grammar="{}")}, "structure: output with a structure is not served"),
        ({"sampling": Sampling(logit_bias=((5, 1.0),))}, "logit_bias: vLLM may ignore it"),
        ({"sampling": Sampling(temperature=3.0)}, "temperature must be"),
        ({"error": "structure: of a later version"}, "structure: of a later version"),
    ],
)
def test_what_cannot_be_run_is_taken_and_its_row_says_why(toy: VllmEngine, changes: dict[str, Any], why: str) -> None:
    given = {"tokens": [1], "prompt_len": 1, "sampling": Sampling(), "limits": Limits(4)} | changes
    toy.admit(Admission("bad", 3, **given))
    assert toy.runnable(Run("bad", 4, 64))
    (row,) = toy.step([Run("bad", 4, 64)], 2).rows
    assert (row.finish, row.placement) == (Finish.ERROR, 3)
    assert row.error.startswith(why)
    assert not toy.runnable(Run("bad", 4, 64))
    toy.forget("bad")


def test_a_request_whose_output_is_complete_ends_without_a_pass(toy: VllmEngine) -> None:
    toy.admit(Admission("a", 1, [1, 2, 3, 4], 2, Sampling(), Limits(2)))
    (row,) = toy.step([Run("a", 4, 64)], 2).rows
    assert (row.start, row.tokens, row.finish) == (2, (), Finish.LENGTH)
    toy.forget("a")


def test_the_warm_up_measures_the_costs_and_leaves_nothing(toy: VllmEngine) -> None:
    cost = measure(toy, slots=2).profile
    assert cost.verify_s > 0
    assert cost.prefill_token_s > 0
    assert cost.offload_block_s == 0
    assert (toy.held(), toy.free_blocks) == ([], toy.blocks)


def test_sizes_are_what_was_asked_for(toy: VllmEngine) -> None:
    assert (toy.blocks, toy.block_tokens, toy.context_tokens) == (100, BLOCK_TOKENS, 1600)


def test_without_speculation_bias_is_served_and_nothing_is_drafted() -> None:
    of = configured(drafter="none")
    assert (set(of.model.refused), of.max_draft) == ({"structure", "embedding", "prompt_logprobs"}, 0)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"model": "/nowhere"}, "no config.json"),
        ({"vllm_args": {"tensor_parallel_size": 0}}, "vLLM cannot serve it"),
        ({"vllm_args": {"no_such_argument": 1}}, "vLLM cannot serve it"),
        ({"drafter": "none", "vllm_args": {"pipeline_parallel_size": 2}}, "stages fail with enforce_eager"),
        ({"kv_tokens": 320, "vllm_args": {"max_model_len": 640}}, "max_model_len 640 is more than the 320 tokens"),
    ],
)
def test_what_vllm_refuses_is_a_sentence(told: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why) as error:
        configured(**told)
    assert "\n" not in str(error.value)


def test_arguments_that_make_another_model_of_the_files_have_a_fingerprint_of_their_own() -> None:
    """Workers of one service must agree on it, and stored requests go on under the same one only."""
    same, other = configured(vllm_args={"seed": 1}), configured(vllm_args={"hf_overrides": {"rope_theta": 5.0}})
    assert same.model.fingerprint == fingerprint(MODEL) != other.model.fingerprint


@pytest.mark.parametrize("trusted", [True, False])
def test_code_that_comes_with_a_tokenizer_is_trusted_where_vllm_is_told_so(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, asked = AutoTokenizer.from_pretrained, []

    def from_pretrained(*args: Any, **told: Any) -> Any:
        asked.append(told["trust_remote_code"])
        return load(*args, **told)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    configured(vllm_args={"trust_remote_code": trusted})
    assert asked == [trusted]


class NotCausal(ToyExecutor):
    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        (answer,) = super().collective_rpc(method, *args, **kwargs)
        if method == "get_kv_cache_spec":
            answer = {name: replace(spec, non_causal=True) for name, spec in answer.items()}
        return [answer]


def test_a_model_whose_prompts_cannot_be_computed_in_parts_is_refused() -> None:
    with pytest.raises(ModelError, match="attention is not causal"):
        engine(vllm_args={"distributed_executor_backend": NotCausal})


class OtherBlocks(ToyExecutor):
    """vLLM takes larger blocks when it knows how the model attends: several times the memory, for as many of them."""

    def _init_executor(self) -> None:
        self.cache_config.block_size = 4 * BLOCK_TOKENS
        super()._init_executor()


def test_memory_that_was_reckoned_with_other_blocks_is_refused() -> None:
    args = {"distributed_executor_backend": OtherBlocks}
    with pytest.raises(
        ModelError, match=r'^kv_tokens: vLLM has blocks of 64 tokens .* add "block_size": 64 to --vllm-args'
    ):
        engine(vllm_args=args)
    engine(vllm_args=args | {"block_size": 4 * BLOCK_TOKENS}).close()
