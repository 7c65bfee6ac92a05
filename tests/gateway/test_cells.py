"""Several cells behind two gateways: where new requests go, and that any gateway finds them again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.cell_file import Cell, CellList, read_cells
from gateway.cells import Cells
from gateway.config import Settings
from laps_sd.client import AsyncClient, BadInput, NotServing, UnknownRequest
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import status_pb2 as status_pb
from tests.gateway.harness import Link, Scheduler, ending, gateway, ids, model_info
from tests.waiting import until

NAMES = ("a", "b")


def write(file: Path, *cells: str, version: int = 1) -> Path:
    file.write_text(f"version = {version}\n" + "".join(f"\n[[cell]]\n{cell}\n" for cell in cells))
    return file


# ---- the file ----


def test_a_file_tells_each_cell(tmp_path: Path) -> None:
    file = write(
        tmp_path / "cells.toml",
        'name = "a"\nschedulers = "a-0.example:1,a-1.example:1"\ndrain = true',
        'name = "b"\nschedulers = "b:2"\nsince = 3',
        version=3,
    )
    first = Cell("a", ("a-0.example:1", "a-1.example:1"), drain=True)
    assert read_cells(file) == CellList(3, (first, Cell("b", ("b:2",), since=3)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version = 1\n[[cell]]\nname =\n", ":3: "),
        ("\n[[cell]]\nname = 'a'\nschedulers = 'a:1'\n", ":1: version: must be a whole number from 1"),
        ("version = 1\n", ":1: cell: beside `version` there are 1 to 256"),
        ("version = 1\nworkers = 2\n", ":2: workers: beside `version`"),
        ("version = 1\n[[cell]]\nname = 'A'\nschedulers = 'a:1'\n", ":3: name: 1 to 16 small letters"),
        ("version = 1\n[[cell]]\nname = 'a'\nschedulers = 'a'\n", ":4: schedulers: 'a' is not HOST:PORT"),
        ("version = 1\n[[cell]]\nname = 'a'\n", ":2: schedulers: "),
        ("version = 1\n[[cell]]\nname = 'a'\nschedulers = 'a:1'\nsince = 2\n", ":5: since: must be from 1 to"),
        ("version = 1\n[[cell]]\nname = 'a'\nschedulers = 'a:1'\ndrains = true\n", ":5: drains: a cell has name"),
        ("version = 1\n[[cell]]\nname = 'a'\nschedulers = 'a:1'\ndrain = 1\n", ":5: drain: 1 is of the wrong kind"),
        ("version = 1\n[[cell]]\nname = 'a'\nschedulers = 'a:1'\ndrain = true\n", ":5: drain: one cell must be left"),
        (
            "version = 1\n[[cell]]\nname = 'a'\nschedulers = 'a:1'\n[[cell]]\nname = 'a'\nschedulers = 'b:1'\n",
            ":6: name: there are two cells 'a'",
        ),
    ],
)
def test_a_wrong_file_is_told_with_its_line(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "cells.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"cells.toml{problem}"):
        read_cells(file)


def test_a_file_that_is_not_there_is_told_with_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere[.]toml: No such file or directory"):
        Settings(cells=tmp_path / "nowhere.toml")


# ---- ids that clients chose ----


def router(*cells: Cell, version: int = 1) -> Cells:
    return Cells(lambda schedulers: None, lambda: CellList(version, cells))  # type: ignore[arg-type, return-value]


SOME = [f"order-{number}" for number in range(400)]


def test_a_chosen_id_has_one_home_and_ids_are_spread() -> None:
    cells = router(*(Cell(name, ("h:1",)) for name in "abcd"))
    homes = [cells.homes(id) for id in SOME]
    assert all(len(home) == 1 for home in homes)
    assert all(60 < homes.count([name]) < 140 for name in "abcd")


def test_a_cell_that_is_added_takes_its_share_and_what_was_there_is_still_looked_for() -> None:
    before = router(*(Cell(name, ("h:1",)) for name in "abc"))
    after = router(*(Cell(name, ("h:1",)) for name in "abc"), Cell("d", ("h:1",), since=2), version=2)
    moved = [id for id in SOME if after.homes(id)[0] != before.homes(id)[0]]
    assert 60 < len(moved) < 140
    assert all(after.homes(id) == ["d", *before.homes(id)] for id in moved)


def test_what_a_draining_cell_has_is_looked_for_there_and_nothing_new_comes() -> None:
    before = router(*(Cell(name, ("h:1",)) for name in "abc"))
    after = router(*(Cell(name, ("h:1",), drain=name == "a") for name in "abc"))
    for id in SOME:
        assert after.homes(id)[0] != "a"
        assert before.homes(id)[0] in after.homes(id)


# ---- two gateways ----


class Service:
    """Two cells with scripted schedulers, and two gateways, each with a link to both."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.cells = dict(zip(NAMES, (Scheduler(), Scheduler()), strict=True))
        self.gateways: list[Gateway] = []
        self.clients: list[AsyncClient] = []
        self.links: dict[str, list[Link]] = {name: [] for name in NAMES}

    def write(self, version: int = 1, drain: str = "") -> None:
        cells = [
            f'name = "{name}"\nschedulers = "127.0.0.1:{cell.port}"\ndrain = {str(name == drain).lower()}'
            for name, cell in self.cells.items()
        ]
        write(self.file, *cells, version=version)


@asynccontextmanager
async def service(folder: Path, **models: Any) -> AsyncIterator[Service]:
    made = Service(folder / "cells.toml")
    async with AsyncExitStack() as stack:
        for name, cell in made.cells.items():
            cell.serving = pb.Serving(ready=True, model=models.get(name, model_info()))
            await cell.start()
            stack.push_async_callback(cell.stop)
        made.write()
        for _ in range(2):
            served = await stack.enter_async_context(gateway(cells=made.file))
            made.gateways.append(served)
            made.clients.append(await stack.enter_async_context(AsyncClient(served.grpc, max_retries=0)))
            for name, cell in made.cells.items():
                made.links[name].append(await cell.link())

            async def both(served: Gateway = served) -> bool:
                return all(link.ready for link in served.cells.links.values())

            await until(both)
        yield made


async def load(link: Link, backlog_s: float, free: int = 0) -> None:
    told = pb.Load(backlog_s=[backlog_s] * 3, request_s=1.0, free_slots=free)
    await link.send(serving=pb.Serving(ready=True, load=told))


async def answered(made: Service, client: int, name: str, **params: Any) -> str:
    """A request that must come to that cell; returns its id."""

    asking = asyncio.create_task(made.clients[client].complete("the", **params))
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


async def test_any_gateway_resumes_and_tells_of_a_request_by_its_id(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        for name in NAMES:
            id = f"{name}-0123"
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
            await made.clients[1].status("a-none")


async def test_a_chosen_id_goes_to_the_same_cell_from_every_gateway(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        for number in range(4):
            id = f"order-{number}"
            (home,) = made.gateways[0].cells.homes(id)
            for client in range(2):
                assert await answered(made, client, home, request_id=id) == id


async def test_when_a_cell_dies_new_requests_go_elsewhere_and_its_own_wait(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        await made.cells["a"].stop()

        async def noticed() -> bool:
            return not made.gateways[0].cells.links["a"].ready

        await until(noticed)
        for _ in range(3):
            assert (await answered(made, 0, "b")).startswith("b-")
        with pytest.raises(NotServing):
            await made.clients[0].status("a-0123")
        await made.cells["a"].start()
        made.cells["a"].known["a-0123"] = status_pb.RequestStatus(request_id="a-0123", tenant="default")
        await made.cells["a"].link()

        async def back() -> bool:
            return made.gateways[0].cells.links["a"].scheduler.up

        await until(back)
        assert (await made.clients[0].status("a-0123")).request_id == "a-0123"


async def test_a_cell_drains_while_gateways_serve(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        made.write(version=2, drain="a")

        async def read() -> bool:
            return made.gateways[0].cells.version == 2

        await until(read)
        for _ in range(3):
            assert (await answered(made, 0, "b")).startswith("b-")


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


async def test_figures_of_all_cells_are_told_as_those_of_one_service(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        assert (await made.clients[0].stats()).waiting == 6  # three in each
        for name in NAMES:
            made.cells[name].known[name] = status_pb.RequestStatus(request_id=name)
        first = await made.clients[0].list_requests()
        second = await made.clients[0].list_requests(page_token=first.next_page_token)
        assert [status.request_id for page in (first, second) for status in page.requests] == ["a", "b"]
        assert not second.next_page_token


def test_two_choices_balance_what_one_would_not() -> None:
    """The mean of many draws: the emptier of two is taken, so the fullest cell of many gets nothing."""
    cells = router(*(Cell(f"c{number}", ("h:1",)) for number in range(8)))
    cells._random = Random(1)
    waits = {f"c{number}": float(number) for number in range(8)}

    class FakeLink:
        ready, feeds = True, ()

        def __init__(self, name: str) -> None:
            self.model = type("Model", (), {"name": "m"})
            self._name = name

        def wait(self, priority: int) -> tuple[bool, float]:
            return True, waits[self._name]

    cells.links = {name: FakeLink(name) for name in waits}  # type: ignore[misc]
    chosen = [cells.new_id("m", 1, "x").partition("-")[0] for _ in range(800)]
    assert chosen.count("c7") == 0
    assert chosen.count("c0") > chosen.count("c3") > chosen.count("c6")
