"""Drafters: what they propose, that they may forget, and that none of them changes the output."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.tiny_model import make_tiny_model
from tests.worker.harness import Driver, Tiny
from tests.worker.test_exactness import TEXTS
from worker_service.drafters import make_drafter, vocabulary_digest
from worker_service.engine import native
from worker_service.engine.drafting.chain import NativeRecurrence, TorchRecurrence
from worker_service.engine.drafting.drafter import ALL, Ask, Chain, Drafter, FirstOf, NoDrafter, Price, Verified
from worker_service.engine.drafting.head import DraftHead, DraftHeadConfig, load_head, save_head
from worker_service.engine.drafting.head_drafter import HeadDrafter
from worker_service.engine.drafting.model import ModelDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.drafting.shielded import Shielded
from worker_service.engine.engine import Engine
from worker_service.engine.target import InputSequence, Passed
from worker_service.engine.types import Limits, Run, Sampling
from worker_service.engine.warm_up import measure
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel, load

KINDS = ["head", "model", "model in little memory", "n-grams, then head"]


def random_head(tiny: Tiny) -> DraftHead:
    """It proposes every token, and is hardly ever right."""
    config = tiny.model.config
    head = DraftHead(
        DraftHeadConfig("tiny", vocabulary_digest(tiny.tokenizer), config.hidden_size, 32, config.vocab_size)
    )
    head.draft_ids.copy_(torch.arange(config.vocab_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in (head.join.weight, head.gate_up.weight, head.down.weight):
            torch.nn.init.normal_(weight, std=0.3)
    return head.requires_grad_(False)


def head_drafter(tiny: Tiny, price: Price = ALL) -> HeadDrafter:
    tables = tiny.model.get_input_embeddings().weight, tiny.model.get_output_embeddings().weight
    return HeadDrafter(random_head(tiny), *tables, price=price)


def model_drafter(folder: Path, blocks: int = 100, context_tokens: int = 1024) -> ModelDrafter:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return ModelDrafter(model, context_tokens=context_tokens, blocks=blocks, block_tokens=8)


def make(kind: str, tiny: Tiny, tmp_path: Path) -> Drafter:
    if kind == "head":
        return head_drafter(tiny)
    if kind == "n-grams, then head":
        return FirstOf(NgramDrafter(longest=8, shortest=2), head_drafter(tiny))
    other = make_tiny_model(tmp_path, seed=1)  # of other weights: right now and then
    return model_drafter(other, blocks=12 if "little" in kind else 100)


def run_with_losses(driver: Driver) -> dict[str, list[int]]:
    """Every draft length from 0 to 5 in one batch, and now and then a request loses what was cached of it."""
    for i, text in enumerate(TEXTS[:6]):
        driver.admit(str(i), driver_prompt(driver, text), Limits(max_tokens=24), Sampling(temperature=i % 2, seed=i))
    for round_ in range(200):
        live = [name for name in driver.admitted if name not in driver.finished]
        if not live:
            return driver.outputs
        if round_ % 7 == 3:
            driver.engine.drop(live[0])
        if round_ in (5, 16, 27):
            driver.readmit(live[-1], len(driver.outputs[live[-1]]) // 2)
        driver.step(Run(name, (round_ + i) % 6, 16) for i, name in enumerate(live[: 3 + round_ % 4]))
    raise AssertionError("never finished")


def driver_prompt(driver: Driver, text: str) -> list[int]:
    return list(driver.engine._tokenizer.encode(text).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_drafter_changes_the_output(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    plain = run_with_losses(Driver(tiny.engine(drafter=NoDrafter())))
    driver = Driver(tiny.engine(drafter=make(kind, tiny, tmp_path)))
    assert run_with_losses(driver) == plain
    assert sum(row.drafted for row in driver.rows) > 100
    assert driver.engine.free_blocks == driver.engine.blocks


def test_a_draft_model_that_is_the_target_is_always_right(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(drafter=model_drafter(tiny.folder)))
    for i, text in enumerate(TEXTS):
        driver.admit(str(i), tiny.prompt(text), Limits(max_tokens=40))
    driver.finish_all(draft_len=lambda n: n % 6)  # after a round without drafts it has to catch up
    drafted = sum(row.drafted for row in driver.rows)
    assert sum(row.accepted for row in driver.rows) > 0.97 * drafted > 100  # what ends a request may cut drafts off


@torch.inference_mode()
def test_a_draft_model_does_not_compute_accepted_drafts_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = model_drafter(tiny.folder)
    prompt = tiny.prompt(TEXTS[0])
    drafts = drafter.propose([Ask("a", prompt, 4)])[0]
    computed = []
    forward = drafter._model.forward
    monkeypatch.setattr(
        drafter._model, "forward", lambda segments: computed.append(segments[0].tokens) or forward(segments)
    )
    drafter.propose([Ask("a", [*prompt, *drafts, 7], 1)])
    assert computed == [[drafts[-1], 7]]  # of the last draft nobody had asked what follows


@torch.inference_mode()
def test_a_draft_model_computes_what_prompts_begin_with_once_for_each_tenant(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = model_drafter(tiny.folder)
    computed: list[int] = []
    forward = drafter._model.forward
    monkeypatch.setattr(
        drafter._model, "forward", lambda segments: computed.append(len(segments[0].tokens)) or forward(segments)
    )
    prompt = list(range(20, 40))  # two blocks of eight, and four tokens more
    asks = [Ask("first", prompt, 1, "a"), Ask("second", [*prompt[:18], 7], 1, "a"), Ask("theirs", prompt, 1, "b")]
    drafts = [drafter.propose([ask]) for ask in asks]
    assert computed == [20, 3, 20]
    assert drafts[0] == drafts[2]


@torch.inference_mode()
def test_a_draft_models_drafts_are_never_shared(tiny: Tiny) -> None:
    """The first one's drafts fill its block, and the target has not agreed to them."""
    drafter = model_drafter(tiny.folder)
    prompt = list(range(20, 26))
    drafts = drafter.propose([Ask("first", prompt, 6)])[0]
    other = drafter.propose([Ask("second", [*prompt, *drafts], 1)])
    assert drafter._states["first"].kv.table[0] != drafter._states["second"].kv.table[0]
    assert other == model_drafter(tiny.folder).propose([Ask("alone", [*prompt, *drafts], 1)])


@torch.inference_mode()
def test_what_a_draft_models_pass_failed_to_compute_is_shared_with_nobody(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, computed, prompt = model_drafter(tiny.folder), list[int](), list(range(20, 40))
    forward = drafter._model.forward

    def once_failing(sequences: Sequence[InputSequence]) -> Passed:
        computed.append(len(sequences[0].tokens))
        if len(computed) == 1:
            raise torch.OutOfMemoryError("no room")
        return forward(sequences)

    monkeypatch.setattr(drafter._model, "forward", once_failing)
    shielded = Shielded(drafter)
    assert shielded.propose([Ask("first", prompt, 1)]) == [[]]
    assert len(shielded.propose([Ask("second", prompt, 1)])[0]) == 1
    assert computed == [20, 20]


@torch.inference_mode()
def test_a_draft_model_is_silent_past_its_context(tiny: Tiny) -> None:
    drafter = model_drafter(tiny.folder, context_tokens=10)
    assert len(drafter.propose([Ask("a", [5] * 7, 3)])[0]) == 3
    assert drafter.propose([Ask("a", [5] * 8, 3)]) == [[]]


def test_a_head_drafts_from_the_newest_hidden_state_alone(tiny: Tiny) -> None:
    drafter = head_drafter(tiny)
    hidden = torch.linspace(-1, 1, tiny.model.config.hidden_size)
    assert drafter.propose([Ask("a", [1, 2, 3], 2)]) == [[]]
    drafter.verified([Verified("a", [1, 2, 3], hidden), Verified("b", [1, 2], -hidden)])
    asks = [Ask("a", [1, 2, 3], 2), Ask("b", [1, 2], 5), Ask("c", [1], 3)]
    together = drafter.propose(asks)
    assert [len(drafts) for drafts in together] == [2, 5, 0]
    assert together == [drafter.propose([ask])[0] for ask in asks]
    assert drafter.propose([Ask("a", [1, 2, 3, 4], 2)]) == [[]]  # of token 4 it has seen nothing


def test_a_head_stops_where_it_is_not_sure(tiny: Tiny) -> None:
    hidden = torch.linspace(-1, 1, tiny.model.config.hidden_size)
    lengths = []
    for least in (0.0, 1e-4, 1e-2, 1.1):
        drafter = head_drafter(tiny, Price(least))
        drafter.verified([Verified("a", [3], hidden)])
        lengths.append(len(drafter.propose([Ask("a", [3], 8)])[0]))
    assert lengths[0] == 8
    assert lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True)


def test_a_head_goes_on_only_where_the_next_draft_may_be_worth_it_too() -> None:
    assert [Price(0.3).goes_on([chance]) for chance in (0.49, 0.51)] == [False, True]
    assert Price(0.9).goes_on([0.96])  # after a draft that is all but certain there is another one at any price
    assert not Price(0.3, 0.2).goes_on([0.6, 0.1])  # a little more than the price is not worth the time of all
    assert Price(0.3, 0.2).goes_on([0.8, 0.8])
    assert ALL.goes_on([0.0])
    assert [Price(0.3).goes_on([math.nan, chance]) for chance in (0.1, 0.9)] == [False, True]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(make_tiny_model(tmp_path_factory.mktemp("target"))), "cpu", "float32")


def drafter_named(name: object, target: LoadedModel) -> Drafter:
    return make_drafter(str(name), target, blocks=10, block_tokens=8)


def test_a_head_comes_back_from_its_directory_as_it_was(tiny: Tiny, tmp_path: Path, target: LoadedModel) -> None:
    head = random_head(tiny)
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head")
    assert again.config == head.config
    for name, weight in head.state_dict().items():
        assert torch.allclose(again.state_dict()[name].float(), weight.float(), rtol=1e-2)  # bfloat16
    assert isinstance(drafter_named(tmp_path / "head", target), FirstOf)


def test_default_is_ngram_where_no_head_was_made_for_the_target(target: LoadedModel) -> None:
    assert isinstance(drafter_named("default", target), NgramDrafter)


def test_a_small_model_of_the_same_tokenizer_can_draft(tmp_path: Path, target: LoadedModel) -> None:
    assert isinstance(drafter_named(make_tiny_model(tmp_path, seed=3), target), ModelDrafter)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"vocabulary": "', '"vocabulary": "x', "was made for tiny, not for"),
        ('"intermediate_size": 32', '"intermediate_size": 16', "no draft head of this version"),
        ('"intermediate_size"', '"size"', "no draft head of this version"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    old: str, new: str, problem: str, tiny: Tiny, tmp_path: Path, target: LoadedModel
) -> None:
    save_head(random_head(tiny), tmp_path)
    file = tmp_path / "head.json"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ModelError, match=problem) as refused:
        drafter_named(tmp_path, target)
    assert "\n" not in str(refused.value), "whoever supervises the worker tells one line"


@pytest.mark.parametrize("file", ["head.json", "head.safetensors"])
def test_a_head_whose_file_is_cut_short_is_refused(file: str, tiny: Tiny, tmp_path: Path, target: LoadedModel) -> None:
    save_head(random_head(tiny), tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:60])
    with pytest.raises(ModelError, match="drafter"):
        drafter_named(tmp_path, target)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_head_with_tokens_that_the_target_has_not_is_refused(
    token: int, tiny: Tiny, tmp_path: Path, target: LoadedModel
) -> None:
    head = random_head(tiny)
    head.draft_ids[5] = token
    save_head(head, tmp_path)
    with pytest.raises(ModelError, match="its tokens are not among"):
        drafter_named(tmp_path, target)


@pytest.mark.parametrize("of", ["head", "state"])
def test_a_head_proposes_nothing_where_its_numbers_are_none(of: str, tiny: Tiny) -> None:
    head, size = random_head(tiny), tiny.model.config.hidden_size
    config = replace(head.config, draft_tokens=160)  # a size that the native kernel takes
    head = DraftHead(config).requires_grad_(False)
    tables = tiny.model.get_input_embeddings().weight, tiny.model.get_output_embeddings().weight
    if of == "head":
        head.join.weight[0, 0] = math.nan
    drafter = HeadDrafter(head, *tables, price=ALL)
    state = torch.full((size,), math.nan) if of == "state" else torch.ones(size)
    drafter.verified([Verified("a", [3], state)])
    assert drafter.propose([Ask("a", [3], 8)]) == [[]]


def test_a_head_keeps_nothing_of_a_round_but_its_row(tiny: Tiny) -> None:
    """A request may wait for long, and the round's hidden states with it."""
    tables = tiny.model.get_input_embeddings().weight, tiny.model.get_output_embeddings().weight
    drafter = HeadDrafter(random_head(tiny), *tables, price=ALL)
    round = torch.randn(64, tiny.model.config.hidden_size)
    drafter.verified([Verified("a", [3], round[7])])
    drafts = drafter.propose([Ask("a", [3], 8)])
    round.zero_()
    assert drafter.propose([Ask("a", [3], 8)]) == drafts != [[]]
    (_, row), *_ = drafter._states.values()
    assert row.untyped_storage().nbytes() == row.numel() * row.element_size()


@pytest.mark.parametrize("larger", ["draft", "target"])
def test_target_and_draft_model_may_differ_in_what_fills_up_their_vocabularies(larger: str, tiny: Tiny) -> None:
    def padded(model: LlamaForCausalLM, more: int) -> LlamaForCausalLM:
        model.resize_token_embeddings(model.config.vocab_size + more, mean_resizing=False)
        return model.eval()

    size = tiny.model.config.vocab_size
    models = (LlamaForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32) for _ in range(2))
    target, draft = (
        padded(model, 64 * (name == larger)) for model, name in zip(models, ("target", "draft"), strict=True)
    )
    if larger == "draft":  # it prefers what the target has not
        draft.get_output_embeddings().weight = torch.nn.Parameter(
            torch.cat([torch.zeros(size, 64), torch.ones(64, 64)])
        )
    drafter = ModelDrafter(draft, context_tokens=1024, blocks=50, block_tokens=16)
    engine = Engine(
        target, tiny.tokenizer, eos_ids=frozenset(), context_tokens=1024, blocks=50, block_tokens=16, drafter=drafter
    )
    driver = Driver(engine)
    driver.admit("a", tiny.prompt(TEXTS[0]) + [size + 3] * (larger == "target"), Limits(max_tokens=12))
    driver.finish_all()
    assert len(driver.outputs["a"]) == 12
    driver.forget_all()


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        drafter_named(tmp_path / "nowhere", target)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    folder = make_tiny_model(tmp_path)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"!": 2,', '"!": 3,').replace('"\\"": 3,', '"\\"": 2,'))
    with pytest.raises(ModelError, match="another tokenizer"):
        drafter_named(folder, target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_leaves_nothing_behind(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    drafter = make(kind, tiny, tmp_path)
    with torch.inference_mode():
        drafter.rehearse(3, 4)
    for each in drafter._drafters if isinstance(drafter, FirstOf) else [drafter]:
        assert not getattr(each, "_states", {})  # n-grams keep nothing at all
        if isinstance(each, ModelDrafter):
            assert each._pool.free_blocks == each._pool.blocks


def test_warm_up_sees_what_a_draft_costs_though_lookups_hit(tiny: Tiny) -> None:
    class Slow(HeadDrafter):
        steps = 0

        def rehearse(self, batch: int, draft_len: int) -> None:
            Slow.steps += draft_len
            super().rehearse(batch, draft_len)

    tables = tiny.model.get_input_embeddings().weight, tiny.model.get_output_embeddings().weight
    lookup, both = NgramDrafter(), FirstOf(NgramDrafter(), Slow(random_head(tiny), *tables))
    free, dear = (
        measure(tiny.engine(blocks=64, drafter=drafter), slots=4).profile.draft_s for drafter in (lookup, both)
    )
    assert Slow.steps > 0
    assert dear > free


@pytest.mark.parametrize("kind", ["head", "n-grams, then head"])
def test_where_drafts_are_dear_those_that_are_likely_wrong_are_left_out(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    def drafted(least: float) -> int:
        drafter = make(kind, tiny, tmp_path)
        driver = Driver(tiny.engine(drafter=drafter))
        drafter.price(Price(least))
        driver.admit("a", tiny.prompt(TEXTS[0]), Limits(max_tokens=40))
        driver.finish_all()
        return sum(row.drafted for row in driver.rows)

    assert drafted(0.0) > drafted(0.6) >= drafted(1.1) == 0


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_both_ways_to_compute_chains_draft_the_same(
    batch: int, width: int, dtype: torch.dtype, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where whole weights are not multiplied in tiles, those of the head have 8 bits."""
    torch.manual_seed(0)
    monkeypatch.setattr(native, "has_tiles", lambda: tiles)
    head = DraftHead(DraftHeadConfig("target", "", hidden_size=64, intermediate_size=96, draft_tokens=160))
    head.draft_ids.copy_(torch.randperm(200)[:160])
    for norm in (head.state_norm, head.token_norm, head.mlp_norm, head.output_norm):
        torch.nn.init.uniform_(norm, 0.5, 2.0)
    embeddings, output = torch.randn(200, 64), torch.randn(160, 64) / 4
    assert NativeRecurrence.supports(head, embeddings) == (native.kernels() is not None)
    if not NativeRecurrence.supports(head, embeddings):
        pytest.skip("no native kernels here")
    state, tokens = torch.randn(batch, 64), list(range(batch))
    natively = NativeRecurrence(head, embeddings.to(dtype), output)
    assert {product.bits for product in natively._products} == {16 if tiles else 8}
    exactly = TorchRecurrence(head, embeddings, output)
    with torch.inference_mode():
        for price in (ALL, Price(1e-4, -1.0), Price(0.02, 0.05), Price(0.001, 0.4), Price(1.1)):
            drafted, positions = natively(state, tokens, width, 5, price)
            assert [len(chains) for chains in drafted] == [width] * batch
            assert exactly(state, tokens, width, 5, price).positions == pytest.approx(positions, abs=1)
            for own, token, chains in zip(state, tokens, drafted, strict=True):
                firsts = [chain[0][0] for chain in chains if chain]
                assert len(set(firsts)) == len(firsts)
                for chain in chains:
                    assert_is_greedy(head, embeddings, output, own, token, chain, width)
            if price is ALL:
                assert {len(chain) for chains in drafted for chain in chains} == {positions} == {5}


def assert_is_greedy(
    head: DraftHead,
    embeddings: torch.Tensor,
    output: torch.Tensor,
    state: torch.Tensor,
    token: int,
    chain: Chain,
    width: int,
) -> None:
    """Each draft is the likeliest after those before it, the first one of the `width` likeliest; but for rounding."""
    before = 1.0
    for at, (draft, chance) in enumerate(chain):
        state = head(state[None], embeddings[token][None])[0]
        shares = (output @ head.output(state)).softmax(-1)
        share = shares[head.draft_ids.tolist().index(draft)]
        assert share >= 0.9 * shares.topk(1 if at else width).values[-1]
        assert chance / before == pytest.approx(float(share), rel=0.1)
        before, token = chance, draft
