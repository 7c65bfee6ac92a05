"""The drafter behind its port, on a tiny model: chains are its greedy text, several workers at once, who is cut off and
why, and what is left of those who are gone."""

from pathlib import Path

import grpc
import pytest

from laps_sd.authority import make_certs
from protos.link.v1.draft_link_pb2_grpc import DraftLinkStub
from protos.serving import channel
from protos.tls import Tls
from tests.tiny_model import make_tiny_model
from tests.waiting import until
from tests.worker.drafting.live_drafter import Peer, drafter
from tests.worker.harness import greedy_differences
from worker_service.drafters import vocabulary_digest
from worker_service.drafting.service import Loaded
from worker_service.models import LoadedModel, load

WISH = {"need": 3, "ahead": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def small(folder: Path) -> LoadedModel:
    return load(str(folder), "cpu", "float32")


@pytest.fixture(scope="module")
def vocabulary(small: LoadedModel) -> str:
    return vocabulary_digest(small.tokenizer)


def prompt(small: LoadedModel, text: str) -> list[int]:
    return list(small.tokenizer(text).input_ids)


async def holds_nothing(loaded: Loaded) -> None:
    async def is_empty() -> bool:
        texts = loaded.passes.texts
        return not texts.by_name and texts.pool.free_blocks == texts.pool.blocks

    await until(is_empty)


async def test_chains_are_the_small_models_greedy_text_before_and_after_a_truth_that_differs(
    folder: Path, small: LoadedModel, vocabulary: str
) -> None:
    async with drafter(folder) as (target, loaded):
        peer = await Peer(target, vocabulary).attach()
        text = prompt(small, "The quick brown fox jumps over the lazy dog. A short request")
        await peer.say({"handle": 1, "tokens": text, **WISH})
        chain = await peer.chain(1, len(text), 6)
        assert greedy_differences(small.model, text, chain) == []
        truth = [chain[0], (chain[1] + 1) % small.model.config.vocab_size]
        await peer.say({"handle": 1, "start": len(text), "tokens": truth, **WISH})
        text += truth
        assert greedy_differences(small.model, text, await peer.chain(1, len(text), 6)) == []
        await peer.say({"handle": 1, "forget": True})
        await holds_nothing(loaded)
        await peer.close()


async def test_workers_are_served_together_and_one_that_is_gone_leaves_nothing(
    folder: Path, small: LoadedModel, vocabulary: str
) -> None:
    async with drafter(folder) as (target, loaded):
        peers = [await Peer(target, vocabulary).attach(worker_id=f"w{n}") for n in range(3)]
        texts = [prompt(small, words) for words in ("Once upon a time", "Speculative decoding", "In the queue")]
        for peer, text in zip(peers, texts, strict=True):
            await peer.say({"handle": 1, "tokens": text, **WISH}, {"handle": 2, "tokens": text[:-1], **WISH})
        for peer, text in zip(peers, texts, strict=True):
            for handle, own in ((1, text), (2, text[:-1])):
                assert greedy_differences(small.model, own, await peer.chain(handle, len(own), 6)) == []
        peers[0].call.cancel()  # as if it were killed

        async def four_are_left() -> bool:
            return len(loaded.passes.texts.by_name) == 4

        await until(four_are_left)
        await peers[1].say({"handle": 1, "start": len(texts[1]), "tokens": [5], **WISH})
        assert len(await peers[1].chain(1, len(texts[1]) + 1, 6)) == 6
        for peer in peers:
            await peer.close()
        await holds_nothing(loaded)


async def test_garbage_ends_that_session_and_harms_nobody(folder: Path, small: LoadedModel, vocabulary: str) -> None:
    async with drafter(folder) as (target, loaded):
        honest = await Peer(target, vocabulary).attach()
        text = prompt(small, "Once upon a time")
        await honest.say({"handle": 1, "tokens": text, **WISH})
        for row in ({"handle": 1, "start": 4, "tokens": [1]}, {"handle": 1, "tokens": [1] * 100_000}):
            liar = await Peer(target, vocabulary).attach()
            await liar.say(row)
            refused = await liar.ended()
            assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.details()
            await liar.close()
        raw = grpc.aio.insecure_channel(target)
        call = raw.stream_stream("/laps_sd.link.v1.DraftLink/Attach")()
        await call.write(b"\xff" * 100)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await raw.close()
        assert greedy_differences(small.model, text, await honest.chain(1, len(text), 6)) == []
        await honest.close()
        await holds_nothing(loaded)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"vocabulary": "another"}, "has another vocabulary than your model: its tokens mean something else"),
        ({"protocol": 9}, "the worker speaks version 9, the drafter 1: upgrade the drafter"),
    ],
)
async def test_who_does_not_fit_is_told_why(
    folder: Path, vocabulary: str, hello: dict[str, object], words: str
) -> None:
    async with drafter(folder) as (target, _):
        peer = Peer(target, vocabulary)
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await peer.attach(**hello)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await peer.close()


async def test_sessions_are_bounded(folder: Path, vocabulary: str) -> None:
    async with drafter(folder, sessions=1) as (target, _):
        first, second = await Peer(target, vocabulary).attach(), Peer(target, vocabulary)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.attach()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.close()
        await second.close()


async def test_who_has_not_greeted_yet_holds_no_session(folder: Path, vocabulary: str) -> None:
    async with drafter(folder, sessions=2) as (target, _), channel(target) as link:
        first = await Peer(target, vocabulary).attach()
        silent = DraftLinkStub(link).Attach()
        await silent.wait_for_connection()
        second = await Peer(target, vocabulary).attach()
        for peer in (first, second):
            await peer.close()
        silent.cancel()


async def test_a_worker_that_says_nothing_is_cut_off(
    folder: Path, vocabulary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protos.silence.SILENT_S", 0.2)
    async with drafter(folder) as (target, _):
        peer = await Peer(target, vocabulary).attach()
        refused = await peer.ended()
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert "nothing was said for 0.2 s" in (refused.details() or "")
        await peer.close()


async def test_only_a_workers_certificate_of_our_authority_gets_in(
    folder: Path, vocabulary: str, tmp_path: Path
) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for where in (ours, others):
        make_certs(where)

    def of(where: Path) -> Tls:
        return Tls(ca=ours / "ca" / "ca.crt", cert=where / "tls.crt", key=where / "tls.key")

    async with drafter(folder, tls=of(ours / "drafter")) as (target, _):
        worker = await Peer(target, vocabulary, of(ours / "worker").channel_credentials()).attach()
        gateway = Peer(target, vocabulary, of(ours / "gateway").channel_credentials())
        with pytest.raises(grpc.aio.AioRpcError, match="worker may call this") as refused:
            await gateway.attach()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        stranger = Peer(target, vocabulary, of(others / "worker").channel_credentials())
        for peer in (stranger, Peer(target, vocabulary)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await peer.attempt()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            await peer.close()
        await gateway.close()
        await worker.close()
