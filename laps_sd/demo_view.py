"""What `laps-sd demo` shows: streams while they run, figures afterwards. Runs nothing, asks nobody."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from laps_sd.client import Collector, Completion, Stats
from laps_sd.tables import Column, FittedTable

_COLORS = {"waiting": "dim", "running": "green", "paused": "yellow", "done": "bold", "failed": "red"}


@dataclass(slots=True)
class Answer:
    """One request as its client sees it. `state` comes from the server, which is asked at every refresh."""

    prompt: str
    max_tokens: int
    state: str = "waiting"
    collector: Collector = field(default_factory=Collector)
    completion: Completion | None = None
    error: str = ""

    @property
    def latency_s(self) -> float:
        return self.completion.timings_ms.e2el / 1e3 if self.completion is not None else float("nan")


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts once, under one policy. `stats`: the service's figures after it."""

    policy: str
    answers: Sequence[Answer]
    stats: Stats

    @property
    def mean_s(self) -> float:
        return fmean(answer.latency_s for answer in self.answers)

    @property
    def finished(self) -> bool:
        return all(answer.completion is not None for answer in self.answers)


def streams(answers: Sequence[Answer], width: int) -> Table:
    """`width`: of the terminal, in characters. Only as much of the end of each answer is shown as fits."""
    tail_characters = max(10, (width - 20) * 3 // 5 - 1)
    table = Table(box=None, expand=True, pad_edge=False)
    table.add_column("state", width=8)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("prompt", ratio=2, no_wrap=True)
    table.add_column("answer, its end", ratio=3, no_wrap=True)
    for answer in answers:
        tail = " ".join("".join(answer.collector.text).split())[-tail_characters:]
        state = Text(answer.state, style=_COLORS[answer.state])
        table.add_row(state, str(len(answer.collector.token_ids)), Text(answer.prompt), Text(answer.error or tail))
    return table


def tell(console: Console, runs: Sequence[Run]) -> None:
    """Prints the figures of all runs."""
    shown, base = _sides(runs)
    console.print(_statistics(shown, base), highlight=False)
    lines = [_totals(shown[0]), _scheduling(shown[0].stats)]
    if base and all(run.finished for run in runs):
        lines.append(f"[bold]{comparison(runs)}[/]")
    for line in lines:  # whole lines for programs that read them
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def comparison(runs: Sequence[Run]) -> str:
    """One sentence: the mean latency under both policies, and of each run, since single runs vary."""
    shown, base = _sides(runs)
    ours, theirs = (fmean(run.mean_s for run in side) for side in (shown, base))
    change = ours / theirs - 1
    each = "; ".join(f"{side[0].policy} {', '.join(f'{run.mean_s:.2f}' for run in side)}" for side in (shown, base))
    runs_told = f"each run: {each}" if len(runs) > 2 else "one run of each, and single runs vary"
    return (
        f"mean latency {ours:.2f} s under {shown[0].policy}, {theirs:.2f} s under {base[0].policy} (first come, first "
        f"served): {abs(change):.0%} {'higher' if change > 0 else 'lower'}; {runs_told}"
    )


def asked_for(runs: Sequence[Run]) -> list[Run]:
    """The runs of the policy that was asked for. If there are others, those of their base, one of them is the first."""
    policy = runs[1].policy if len(runs) > 1 else runs[0].policy
    return [run for run in runs if run.policy == policy]


def _sides(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    shown = asked_for(runs)
    return shown, [run for run in runs if run.policy != shown[0].policy]


def _statistics(shown: Sequence[Run], base: Sequence[Run]) -> FittedTable:
    """A row for each prompt, as it went in the first run shown. Latencies are means over a policy's runs."""
    columns = [Column("prompt", left=True, most=34), Column("tokens", rank=1), Column("accepted", rank=3)]
    columns += [Column("rounds", rank=5), Column("preempted", rank=2), Column("queue s", rank=4)]
    columns += [Column(f"{side[0].policy} s") for side in (shown, base) if side]
    rows = []
    for i, answer in enumerate(shown[0].answers):
        if (done := answer.completion) is None:
            rows.append([answer.prompt, answer.error or "unfinished", *[""] * (len(columns) - 2)])
            continue
        accepted = _share(done.spec_decode.num_accepted_tokens, done.spec_decode.num_draft_tokens)
        rounds = answer.collector.final.rounds if answer.collector.final is not None else 0
        row = [answer.prompt, str(len(done.token_ids)), accepted, str(rounds), str(done.preemptions)]
        row += [f"{done.timings_ms.queue / 1e3:.2f}"]
        row += [f"{fmean(run.answers[i].latency_s for run in side):.2f}" for side in (shown, base) if side]
        rows.append(row)
    return FittedTable(columns, rows)


def _totals(run: Run) -> str:
    done = [answer.completion for answer in run.answers if answer.completion is not None]
    if not done:
        return "no answer was finished"
    tokens = sum(len(answer.token_ids) for answer in done)
    seconds = max(answer.timings_ms.e2el for answer in done) / 1e3
    accepted = sum(answer.spec_decode.num_accepted_tokens for answer in done)
    drafted = sum(answer.spec_decode.num_draft_tokens for answer in done)
    preempted, preemptions = sum(a.preemptions > 0 for a in done), sum(a.preemptions for a in done)
    return (
        f"{run.policy}: {len(done)} of {len(run.answers)} finished: {tokens} tokens in {seconds:.1f} s, "
        f"{tokens / seconds:.0f} tokens/s; drafts {accepted} of {drafted} accepted ({_share(accepted, drafted)}); "
        f"{preempted} preempted and resumed, {preemptions} times in all"
    )


def _scheduling(stats: Stats) -> str:
    outside = max((worker.outside_forward_share for worker in stats.workers), default=0.0)
    idle = max((worker.idle_share for worker in stats.workers), default=0.0)
    p50_ms, p99_ms = (1e3 * one.total_seconds() for one in (stats.report_to_command_p50, stats.report_to_command_p99))
    return (
        f"report to command: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms; "
        f"the model waited {idle:.1%} of the time, {outside:.1%} was outside forward passes"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
