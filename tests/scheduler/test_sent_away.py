"""A scheduler without its store for long sends gateways and workers to look whether another one leads."""

import asyncio
from typing import Any

import pytest

from scheduler_service import leader as leader_module
from scheduler_service.session import WorkerSession
from tests.scheduler.live import Live, ScriptedGateway, ScriptedWorker, Switch, scheduler


async def test_one_of_a_pair_that_the_store_does_not_answer_sends_everybody_to_the_other(
    store: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot hear that the other one leads. No request is blamed, and where nobody else leads all come back."""
    async with scheduler(store, standby=True) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        store.cut = True
        with monkeypatch.context() as impatient:  # not before: an idle store is asked every BEAT_S only
            impatient.setattr(leader_module, "CUT_OFF_S", 0.2)
            impatient.setattr(leader, "_cut_off_s", 0.2)
            await asyncio.gather(gateway.ended(), worker.ended())
        store.cut = False
        assert not leader.core.fleet.isolation.suspects
        back = await ScriptedWorker(target).attach()
        await back.until("a")
        for peer in (gateway, worker, back):
            await peer.close()


async def test_a_worker_that_attaches_while_all_are_sent_away_has_not_crashed(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, first, gateway = live
    await gateway.submit("a")
    await first.until("a")
    await first.report(leaving=True)
    await gateway.until(lambda: not gateway.serving.ready)
    attach = leader.attach

    async def slowly(*args: Any) -> WorkerSession:
        leader._send_away(leader_module.CUT_OFF_S)
        return await attach(*args)

    monkeypatch.setattr(leader, "attach", slowly)
    second = await ScriptedWorker(first.target, "second").attach()
    await second.ended()
    assert "second" not in leader.sessions
    assert not leader.core.fleet.isolation.suspects
    await second.close()


async def test_the_longer_a_store_is_away_the_more_seldom_links_are_ended(store: Switch) -> None:
    async with scheduler(store) as (leader, _):

        def ends_links(silent_s: float) -> bool:
            before = leader.links_ended
            leader._send_away(silent_s)
            return before.is_set()

        after_s = (4, 5, 6, 9, 10, 11, 19, 20, 39, 40)
        assert [silent_s for silent_s in after_s if ends_links(silent_s)] == [5, 10, 20, 40]
        assert not ends_links(0)
        assert ends_links(5)
