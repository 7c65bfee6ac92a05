"""Tables and lines that fit their terminal: bars shrink first, then columns go, the least important first, so that no
number is cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

GAP = 2  # characters between columns
LEAST_BAR = 6


@dataclass(frozen=True, slots=True)
class Column:
    """`rank`: the column with the highest goes first; one of rank 0 always stays. `most`: a longer text ends with …,
    which is for names only. A bar is at most `bar` characters wide."""

    title: str
    rank: int = 0
    left: bool = False
    most: int | None = None
    bar: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell that shows a share."""

    completed: float
    total: float


Cell = str | Text | Bar


class Phrases:
    """Phrases in a row, commas between them. A new line begins between two phrases, not within one."""

    def __init__(self, *phrases: str, style: str = "") -> None:
        self._phrases, self._style = phrases, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._phrases[0]
        for phrase in self._phrases[1:]:
            line += ","
            if len(line) + len(phrase) + 2 > options.max_width:
                yield Text(line, style=self._style)
                line = phrase
            else:
                line += f" {phrase}"
        yield Text(line, style=self._style)


class FittedTable:
    """A table without lines around it. Each row has a cell for each column."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        self._columns, self._rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self.widths(options.max_width)
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
        for i, width in widths.items():
            column = self._columns[i]
            table.add_column(column.title, width=width, no_wrap=True, justify="left" if column.left else "right")
        for row in self._rows:
            table.add_row(*(_drawn(row[i], width) for i, width in widths.items()))
        yield table

    def widths(self, available: int) -> dict[int, int]:
        """The width of each column that stays, by its number. A wider table than `available` remains only if the
        columns of rank 0 alone are too wide."""
        natural = [self._natural(i) for i in range(len(self._columns))]
        kept = list(range(len(self._columns)))
        while True:
            least = {i: min(LEAST_BAR, natural[i]) if self._columns[i].bar else natural[i] for i in kept}
            spare = available - sum(least.values()) - GAP * (len(kept) - 1)
            droppable = [i for i in kept if self._columns[i].rank]
            if spare >= 0 or not droppable:
                break
            kept.remove(max(droppable, key=lambda i: self._columns[i].rank))
        for i in kept:  # what is left over goes to the bars
            more = min(max(0, spare), natural[i] - least[i])
            least[i] += more
            spare -= more
        return least

    def _natural(self, i: int) -> int:
        column = self._columns[i]
        texts = [column.title, *(str(row[i]) for row in self._rows if not isinstance(row[i], Bar))]
        longest = max(Text(text).cell_len for text in texts)
        return max(longest if column.most is None else min(longest, column.most), column.bar)


def _drawn(cell: Cell, width: int) -> Text | ProgressBar:
    if isinstance(cell, Bar):
        return ProgressBar(total=cell.total, completed=cell.completed, width=width)
    return Text(cell) if isinstance(cell, str) else cell
