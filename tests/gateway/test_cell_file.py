"""The file of cells, and to which cell an id belongs that a client chose."""

from pathlib import Path

import pytest
import structlog

from gateway.cell_file import Cell, CellList, read_cells
from gateway.cells import Cells
from gateway.config import Settings


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
        (
            "version = 1\n[[cell]]\nname = 'a'\nschedulers = 'a:1,b:1'\n[[cell]]\nname = 'b'\nschedulers = 'b:1'\n",
            ":7: schedulers: b:1 is one of the cell 'a' already",
        ),
        ("version = 1\ncell = [1]\n", ":2: cell: 1 is none"),
        ("version = 1\ncell = [{name = 'A'}]\n", ":1: name: 1 to 16 small letters"),
        ("version = 1\n[['cell']]\nname = 'A'\n", ":3: name: 1 to 16 small letters"),
        ("version = 1\n[[cell]]\n[[cell", ":3: "),
        (f"version = 1\nx = {'[' * 3000}", ":1: brackets within brackets"),
        ("version = 1\n# \udcff\n", ":2: is not UTF-8"),
    ],
)
def test_a_wrong_file_is_told_with_its_line(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "cells.toml"
    file.write_text(text, errors="surrogateescape")
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


def test_what_came_while_a_cell_drained_is_looked_for_after_another_one_was_added() -> None:
    draining = [Cell(name, ("h:1",), drain=name == "a") for name in "abc"]
    during = router(*draining)
    after = router(*draining, Cell("d", ("h:1",), since=3), version=3)
    for id in SOME:
        assert during.homes(id)[0] in after.homes(id)
        assert after.homes(id)[0] != "a"


def test_what_came_while_a_cell_drained_is_looked_for_after_it_takes_requests_again() -> None:
    during = router(*(Cell(name, ("h:1",), drain=name == "a") for name in "abc"))
    after = router(*(Cell(name, ("h:1",), since=3 if name == "a" else 1) for name in "abc"), version=3)
    assert all(during.homes(id)[0] in after.homes(id) for id in SOME)


def test_a_list_of_an_older_version_is_told_once_and_does_not_count() -> None:
    newest = CellList(2, (Cell("a", ("h:1",)),))
    older = CellList(1, (Cell("b", ("h:1",)),))
    cells = Cells(lambda schedulers: None, lambda: newest)  # type: ignore[arg-type, return-value]
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            cells.look(older)
    assert [entry["event"] for entry in logs] == ["cells_of_an_older_version"]
    assert (cells.version, list(cells.links)) == (2, ["a"])


def test_a_list_that_changed_without_a_new_version_counts_and_is_told() -> None:
    cells = router(Cell("a", ("h:1",)))
    with structlog.testing.capture_logs() as logs:
        cells.look(CellList(1, (Cell("b", ("h:2",)),)))
    assert [entry["event"] for entry in logs] == ["cells_changed_within_a_version", "cells"]
    assert list(cells.links) == ["a", "b"]
