"""Several cells answer as one service: figures, pages of requests, names of workers."""

from pathlib import Path
from typing import Any

import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from gateway.cell_file import read_cells
from protos.errors import BadInput, NotServing, QueueFull
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import status_pb2 as status_pb
from tests.gateway.test_cells import Service, gone, service
from tests.waiting import until


async def test_figures_of_all_cells_are_told_as_those_of_one_service(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        assert (await made.clients[0].stats()).waiting == 6  # three in each


async def listed(made: Service, size: int) -> list[list[str]]:
    """The ids of all pages."""
    pages, token = list[list[str]](), ""
    while token or not pages:
        page = await made.clients[0].list_requests(size, page_token=token)
        pages.append([status.request_id for status in page.requests])
        token = page.next_page_token
    return pages


async def test_a_page_of_requests_goes_on_with_the_next_cell(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        for id in ("a0", "a1", "a2", "b0", "b1"):
            made.cells[id[0]].known[id] = status_pb.RequestStatus(request_id=id)
        assert await listed(made, 0) == [["a0", "a1", "a2", "b0", "b1"]]
        assert await listed(made, 2) == [["a0", "a1"], ["a2", "b0"], ["b1"]]
        assert await listed(made, 3) == [["a0", "a1", "a2"], ["b0", "b1"]]
        with pytest.raises(BadInput, match="page_token"):
            await made.clients[0].list_requests(page_token="c/")
        made.write(version=2, drain="b")
        made.gateways[0].cells.look(read_cells(made.file))
        assert await listed(made, 4) == [["b0", "b1", "a0", "a1"], ["a2"]]
        made.cells["b"].busy = True
        assert await listed(made, 4) == [["a0", "a1", "a2"]]
        await made.cells["b"].stop()
        await until(lambda: gone(made, "b"))
        assert await listed(made, 4) == [["a0", "a1", "a2"]]


async def test_workers_are_named_with_their_cell_also_while_another_cell_is_away(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        await made.cells["a"].stop()
        await until(lambda: gone(made, "a"))
        assert [worker.worker_id for worker in (await made.clients[0].stats()).workers] == ["b/w"]
        id = f"b-{0:032x}"
        made.cells["b"].known[id] = status_pb.RequestStatus(request_id=id, worker_id="w")
        assert [one.worker_id for one in (await made.clients[0].list_requests()).requests] == ["b/w"]
        assert (await made.clients[0].status(id)).worker_id == "b/w"


async def test_figures_are_told_although_the_list_changes_meanwhile(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        cells = made.gateways[0].cells

        async def ask(link: Any) -> int:
            cells.links.pop("a", None)
            return 1

        assert await cells.ask_all(ask) == {"a": 1, "b": 1}


async def test_figures_are_told_although_a_cell_refuses_to_tell_its_own(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        cells = made.gateways[0].cells
        refusing = [cells.links["a"]]

        async def ask(link: Any) -> int:
            if link in refusing:
                raise QueueFull("too many questions")
            return 1

        assert await cells.ask_all(ask) == {"b": 1}
        refusing.append(cells.links["b"])
        with pytest.raises(QueueFull):
            await cells.ask_all(ask)


async def test_a_list_of_requests_is_refused_where_no_cell_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service(tmp_path) as made:

        async def away(request: Any) -> Any:
            raise NotServing("away")

        links = list(made.gateways[0].cells.links.values())
        monkeypatch.setattr(links[0].scheduler, "list_requests", away)
        assert (await made.clients[0].list_requests()).requests == []
        monkeypatch.setattr(links[1].scheduler, "list_requests", away)
        with pytest.raises(NotServing, match="away"):
            await made.clients[0].list_requests()


async def test_the_log_tells_of_which_cell_it_speaks(tmp_path: Path) -> None:
    with capture_logs([merge_contextvars]) as lines:
        async with service(tmp_path):
            pass
    linked = [line for line in lines if line["event"] == "scheduler_linked"]
    assert {line["cell"] for line in linked} == {"a", "b"}


async def test_where_no_cell_takes_requests_the_caller_hears_why(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        cells = made.gateways[0].cells
        none, refusing = pb.Serving(ready=False), pb.Serving(ready=True, refuses=True)
        for away, why in ((none, "no warmed worker"), (refusing, "those that have a worker refuse")):

            async def heard(refuses: bool = away.refuses) -> bool:
                return not cells.ready and all(link.refuses == refuses for link in cells.links.values())

            for name in made.cells:
                await made.links[name][0].send(serving=away)
            await until(heard)
            with pytest.raises(NotServing, match=why):
                await made.clients[0].complete("the")
