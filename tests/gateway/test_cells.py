"""Several cells behind two gateways: where new requests go, and that any gateway finds them again. The file, and the
homes of ids that clients chose: test_cell_file.py."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any
from unittest.mock import AsyncMock

import grpc
import httpx2
import pytest

from gateway import link as gateway_link
from gateway.app import Gateway
from gateway.cell_file import Cell, read_cells
from laps_sd.client import AsyncClient, BadInput, NotServing, UnknownRequest
from protos.link.v1 import gateway_link_pb2 as pb
from protos.oip import inference_pb2 as oip
from protos.oip import inference_pb2_grpc
from protos.tls import Tls
from protos.v1 import status_pb2 as status_pb
from tests.gateway.harness import Link, Scheduler, ending, gateway, ids, model_info
from tests.gateway.test_cell_file import router, write
from tests.waiting import until

NAMES = ("a", "b")
DRAWN = "0" * 32  # what a gateway draws, behind the name of a cell


# ---- two gateways ----


class Service:
    """Two cells with scripted schedulers, and two gateways, each with a link to both."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.cells = dict(zip(NAMES, (Scheduler(), Scheduler()), strict=True))
        self.gateways: list[Gateway] = []
        self.clients: list[AsyncClient] = []
        self.links: dict[str, list[Link]] = {name: [] for name in NAMES}

    def write(self, version: int = 1, drain: str = "", without: str = "") -> None:
        cells = [
            f'name = "{name}"\nschedulers = "127.0.0.1:{cell.port}"\ndrain = {str(name == drain).lower()}'
            for name, cell in self.cells.items()
            if name != without
        ]
        write(self.file, *cells, version=version)


@asynccontextmanager
async def service(
    folder: Path, settings: Mapping[str, Any] = MappingProxyType({}), **models: Any
) -> AsyncIterator[Service]:
    made = Service(folder / "cells.toml")
    async with AsyncExitStack() as stack:
        for name, cell in made.cells.items():
            cell.serving = pb.Serving(ready=True, model=models.get(name, model_info()))
            await cell.start()
            stack.push_async_callback(cell.stop)
        made.write()
        for _ in range(2):
            served = await stack.enter_async_context(gateway(cells=made.file, **settings))
            made.gateways.append(served)
            made.clients.append(await stack.enter_async_context(AsyncClient(served.grpc, max_retries=0)))
            for name, cell in made.cells.items():
                made.links[name].append(await cell.link())

            async def both(served: Gateway = served) -> bool:
                return all(link.ready for link in served.cells.links.values())

            await until(both)
        yield made


async def test_a_model_is_ready_where_a_worker_serves_it_and_not_because_one_serves_another(tmp_path: Path) -> None:
    other = model_info(fingerprint="two")
    other.name = "other"
    async with service(tmp_path, b=other) as made, grpc.aio.insecure_channel(made.gateways[0].grpc) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]

        async def ready(name: str) -> bool:
            return bool((await stub.ModelReady(oip.ModelReadyRequest(name=name))).ready)

        assert [await ready(name) for name in ("tiny", "other")] == [True, True]

        async def heard() -> bool:
            return not await ready("other")

        for away in (pb.Serving(ready=False), pb.Serving(ready=True, refuses=True)):
            await made.links["b"][0].send(serving=away)
            await until(heard)
            assert await ready("tiny")
            await made.links["b"][0].send(serving=pb.Serving(ready=True))
            await until(lambda: ready("other"))
        made.write(version=2, drain="a")

        async def drains() -> bool:
            return not await ready("tiny")

        await until(drains)
        assert await ready("other")


async def load(link: Link, backlog_s: float, free: int = 0) -> None:
    told = pb.Load(backlog_s=[backlog_s] * 3, request_s=1.0, free_slots=free)
    await link.send(serving=pb.Serving(ready=True, load=told))


async def answered(made: Service, client: int, name: str, prompt: str = "the", **params: Any) -> str:
    """A request that must come to that cell; returns its id."""

    asking = asyncio.create_task(made.clients[client].complete(prompt, **params))
    link = made.links[name][client]
    submit = await link.accept()
    made.cells[name].submitted[submit.request_id] = submit
    await link.delta(submit, 0, ids(" fox"), ending=ending())
    assert (await asking).text == " fox"
    return str(submit.request_id)


async def test_a_new_request_goes_where_it_waits_least_and_its_id_names_the_cell(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        for worse, better in (("a", "b"), ("b", "a")):
            for link, backlog_s in ((made.links[worse][0], 9.0), (made.links[better][0], 1.0)):
                await load(link, backlog_s)

            async def heard(worse: str = worse) -> bool:
                links = made.gateways[0].cells.links
                return links[worse].wait(1) == (True, 9.0)

            await until(heard)
            assert (await answered(made, 0, better)).startswith(f"{better}-")


async def test_the_id_that_a_proxy_gives_each_call_chooses_no_cell(tmp_path: Path) -> None:
    async with service(tmp_path) as made, httpx2.AsyncClient(base_url=f"http://{made.gateways[0].http}") as http:
        id = next(id for id in (f"p-{number}" for number in range(99)) if made.gateways[0].cells.homes(id) == ["a"])
        await load(made.links["a"][0], 9.0)

        async def heard() -> bool:
            return made.gateways[0].cells.links["a"].wait(1) == (True, 9.0)

        await until(heard)
        body = {"model": "tiny", "prompt": "the"}
        asking = asyncio.create_task(http.post("/v1/completions", json=body, headers={"x-request-id": id}))
        submit = await made.links["b"][0].accept()
        await made.links["b"][0].delta(submit, 0, ids(" fox"), ending=ending())
        assert (await asking).json()["id"] == f"cmpl-{submit.request_id}"
        assert submit.request_id.startswith("b-")


async def test_any_gateway_resumes_and_tells_of_a_request_by_its_id(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        for name in NAMES:
            id = f"{name}-{DRAWN}"
            submit = pb.Submit(request_id=id, prompt=[1], tenant="default")
            made.cells[name].submitted[id] = submit
            made.cells[name].known[id] = status_pb.RequestStatus(request_id=id, tenant="default")
            assert (await made.clients[1].status(id)).request_id == id
            resumed = made.clients[1].resume(id)
            first = resumed.__anext__()

            reading = asyncio.ensure_future(first)
            assert (await made.links[name][1].next("follow")).request_id == id
            await made.links[name][1].delta(submit, 0, ids(" fox"), ending=ending())
            assert (await reading).text == " fox"
            await resumed.aclose()
        with pytest.raises(UnknownRequest):
            await made.clients[1].status(f"a-{'f' * 32}")


async def test_a_chosen_id_goes_to_the_same_cell_from_every_gateway(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        for number in range(4):
            id = f"order-{number}"
            (home,) = made.gateways[0].cells.homes(id)
            for client in range(2):
                assert await answered(made, client, home, request_id=id) == id


async def test_a_chosen_id_that_begins_like_a_cells_goes_where_it_went_before_that_cell_came(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        cells = made.gateways[0].cells
        id = next(id for id in (f"a-{number}" for number in range(99)) if cells.homes(id) == ["b"])
        assert await answered(made, 0, "b", request_id=id) == id


async def test_when_a_cell_dies_new_requests_go_elsewhere_and_its_own_wait(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        await made.cells["a"].stop()

        async def noticed() -> bool:
            return not made.gateways[0].cells.links["a"].ready

        await until(noticed)
        for _ in range(3):
            assert (await answered(made, 0, "b")).startswith("b-")
        with pytest.raises(NotServing):
            await made.clients[0].status(f"a-{DRAWN}")
        await made.cells["a"].start()
        made.cells["a"].known[f"a-{DRAWN}"] = status_pb.RequestStatus(request_id=f"a-{DRAWN}", tenant="default")
        await made.cells["a"].link()

        async def back() -> bool:
            return made.gateways[0].cells.links["a"].scheduler.up

        await until(back)
        assert (await made.clients[0].status(f"a-{DRAWN}")).request_id == f"a-{DRAWN}"


async def test_a_gateway_whose_only_live_cell_drains_is_not_ready(tmp_path: Path) -> None:
    async with service(tmp_path) as made, httpx2.AsyncClient(base_url=f"http://{made.gateways[0].http}") as http:

        async def answers(status: int) -> bool:
            return (await http.get("/health")).status_code == status

        await made.cells["b"].stop()
        await until(lambda: gone(made, "b"))
        assert await answers(200)
        made.write(version=2, drain="a")
        await until(lambda: answers(503))


async def test_the_health_check_of_grpc_follows_the_list_too(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        await made.cells["b"].stop()
        await until(lambda: gone(made, "b"))
        made.write(version=2, drain="a")

        async def unready() -> bool:
            return not made.gateways[0].server.ready

        await until(unready)


async def hung_up_on_a_dead_cell(made: Service) -> None:
    """A client of the first gateway has hung up on its request in cell b, and the cell dies before it says so."""
    asking = asyncio.create_task(made.clients[0].complete("the", request_id=f"b-{DRAWN}"))
    await made.links["b"][0].accept()
    asking.cancel()
    await made.links["b"][0].next("cancel")
    await made.cells["b"].stop()

    async def given_up() -> bool:
        return made.gateways[0].cells.links["b"].lost

    await until(given_up)


async def test_requests_that_nobody_reads_in_a_dead_cell_take_no_room(tmp_path: Path) -> None:
    async with service(tmp_path, {"max_requests": 1, "reconnect_timeout_s": 0.1}) as made:
        await hung_up_on_a_dead_cell(made)
        assert (await answered(made, 0, "a")).startswith("a-")


async def test_a_dead_cell_that_is_listed_no_more_is_forgotten(tmp_path: Path) -> None:
    async with service(tmp_path, {"reconnect_timeout_s": 0.1}) as made:
        await hung_up_on_a_dead_cell(made)
        made.write(version=2, without="b")

        async def forgotten() -> bool:
            return list(made.gateways[0].cells.links) == ["a"]

        await until(forgotten)


async def test_a_stream_that_begins_as_its_cell_is_left_is_told_so() -> None:
    """Which cell it goes to was chosen before."""
    cell = Scheduler()
    await cell.start()
    link = gateway_link.Link(
        [f"127.0.0.1:{cell.port}"], Tls(), max_requests=1, reconnect_timeout_s=9, rpc_timeout_s=1, on_ready=AsyncMock()
    )
    running = asyncio.create_task(link.run())

    async def up() -> bool:
        return link.scheduler.up

    await until(up)
    running.cancel()
    feed = link.submit(pb.Submit(request_id="a"))
    await asyncio.wait([running])
    assert not link.feeds
    with pytest.raises(NotServing):
        await feed.until_accepted()
    await cell.stop()


async def test_a_cell_drains_while_gateways_serve(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        made.write(version=2, drain="a")

        async def read() -> bool:
            return made.gateways[0].cells.version == 2

        await until(read)
        for _ in range(3):
            assert (await answered(made, 0, "b")).startswith("b-")


async def test_an_id_that_moves_is_new_nowhere_until_all_gateways_know_of_the_move(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        first, second = (served.cells for served in made.gateways)
        id = next(id for id in (f"order-{number}" for number in range(99)) if first.homes(id) == ["a"])
        made.write(version=2, drain="a")
        first._settle_s = 60.0
        first.look(read_cells(made.file))  # the other gateway has not read it yet, and would send it to a
        assert first.homes(id) == ["b", "a"]
        with pytest.raises(NotServing, match="the cell of this id has just changed") as refused:
            await made.clients[0].complete("the", request_id=id)
        assert 0 < refused.value.retry_after_ms <= 60_000
        submit = pb.Submit(request_id=id, prompt=[1], tenant="default")
        made.cells["a"].submitted[id] = submit  # what is there is found
        assert await first.home(id, "tiny") is first.links["a"]
        del made.cells["a"].submitted[id]
        first._settled_s = second._settled_s = 0.0
        assert await answered(made, 0, "b", request_id=id) == id


async def test_a_request_is_found_in_its_cell_while_another_that_may_have_it_is_away(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        cells = made.gateways[0].cells
        here, nowhere = [id for id in (f"order-{number}" for number in range(99)) if cells.homes(id) == ["a"]][:2]
        made.write(version=2, drain="a")
        cells.look(read_cells(made.file))
        assert cells.homes(here) == ["b", "a"]
        made.cells["a"].submitted[here] = pb.Submit(request_id=here, prompt=[1], tenant="default")
        made.cells["a"].known[here] = status_pb.RequestStatus(request_id=here, tenant="default")
        await made.cells["b"].stop()
        await until(lambda: gone(made, "b"))
        assert (await made.clients[0].status(here)).request_id == here
        with pytest.raises(NotServing):
            await made.clients[0].status(nowhere)


async def gone(made: Service, name: str) -> bool:
    return not made.gateways[0].cells.links[name].ready


async def test_one_door_serves_the_models_of_all_cells(tmp_path: Path) -> None:
    other = model_info(fingerprint="two")
    other.name = "small"
    async with service(tmp_path, b=other) as made:
        assert (await answered(made, 0, "b", model="small")).startswith("b-")
        assert (await answered(made, 0, "a", model="tiny")).startswith("a-")
        with pytest.raises(BadInput, match="model: name one of tiny, small"):
            await made.clients[0].complete("the")
        with pytest.raises(UnknownRequest, match="this service has tiny, small"):
            await made.clients[0].complete("the", model="large")
        await made.cells["b"].stop()
        await until(lambda: gone(made, "b"))
        with pytest.raises(BadInput, match="model: name one of tiny, small"):
            await made.clients[0].complete("the")


async def test_an_answers_id_is_understood_although_the_cell_it_hashes_to_is_away(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        cells = made.gateways[0].cells
        drawn = next(id for id in (f"a-{number:032x}" for number in range(99)) if cells.homes(f"cmpl-{id}") == ["b"])
        made.cells["a"].known[drawn] = status_pb.RequestStatus(request_id=drawn, tenant="default")
        await made.cells["b"].stop()
        await until(lambda: gone(made, "b"))
        async with httpx2.AsyncClient(base_url=f"http://{made.gateways[0].http}") as http:
            answer = await http.get(f"/v1/requests/cmpl-{drawn}")
        assert (answer.status_code, answer.json()["id"]) == (200, drawn)


def test_two_choices_balance_what_one_would_not() -> None:
    """The mean of many draws: the emptier of two is taken, so the fullest cell of many gets nothing."""
    cells = router(*(Cell(f"c{number}", ("h:1",)) for number in range(8)))
    cells._random = Random(1)
    waits = {f"c{number}": float(number) for number in range(8)}

    class FakeLink:
        ready, refuses, feeds = True, False, ()

        def __init__(self, name: str) -> None:
            self.model = type("Model", (), {"name": "m"})
            self._name = name

        def wait(self, priority: int) -> tuple[bool, float]:
            return True, waits[self._name]

    cells.links = {name: FakeLink(name) for name in waits}  # type: ignore[misc]
    chosen = [cells.new_id("m", 1, "x").partition("-")[0] for _ in range(800)]
    assert chosen.count("c7") == 0
    assert chosen.count("c0") > chosen.count("c3") > chosen.count("c6")
