"""What `laps-sd bench engine` does: our engine and its peers in turn, by batch size; a table, JSON and a plot."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from worker_service.bench import floor, record, stages
from worker_service.bench.floor import Machine
from worker_service.bench.limits import MAX_DRAFT, MAX_DRAFT_OVER_STAGES
from worker_service.bench.peer import Peer, PeerError
from worker_service.bench.race import Answer, Batch, System, race
from worker_service.bench.subject import BLOCK_TOKENS, Subject, subject
from worker_service.bench.systems import Generate, Ours
from worker_service.engine.engine import Engine
from worker_service.engine.target import Sharers
from worker_service.engine.types import Place
from worker_service.model_files import ModelError
from worker_service.models import load
from worker_service.prompts import PromptError

_PROMPTS = 6  # answered in one repetition, at least: two of each kind
_TRIED = (0, 1, 2, 3, 4, 6, 8)  # draft lengths
_CLEARLY = 1.05  # times the rate without drafts; rates of a short race are about as noisy
_FINAL = 8  # batches, of the best draft length and of none
_PIPE_WIDTH = 140  # of the table where there is no terminal to ask


def run(options: Namespace) -> None:
    """`options`: what command.py was told. Ends the process where it fails or is interrupted."""
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    try:
        if options.plot:
            from worker_service.bench.page import draw
        with ExitStack() as stack, Progress(console=console) as bar:
            found = bench(options, stack, bar)
        show = _print_stages if options.stages > 1 else _print
        show(found, Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH))
        if options.plot:
            options.plot.write_text(draw(found))
    except ImportError:  # of matplotlib
        sys.exit("bench engine: --plot needs the extra: pip install 'laps-sd[lab]'")
    except (ModelError, PromptError, PeerError, OSError) as error:
        sys.exit(f"bench engine: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def bench(options: Namespace, stack: ExitStack, bar: Progress) -> dict[str, Any]:
    """Runs everything; what is found is written after each batch size. Peers end with `stack`."""
    about = subject(options)
    if options.stages > 1:
        return _over_stages(options, about, stack, bar)
    if peerless := about.directory == "" and options.peer:
        raise ModelError(f"--peer {peerless[0].name}: a made-up model has no files that it could load")
    machine = Machine(0.0, 0.0)
    served = about.served()
    work = floor.work_of(about.model(), served)
    engine = _engine(about, served, max(options.batch))
    others, assisted, versions = _others(options, about, stack)
    found: dict[str, Any] = _about(options, about)
    found["versions"] |= versions
    heats: list[record.Heat] = []
    for batch in options.batch:
        draft_len = options.draft_len
        if draft_len is None:
            draft_len = _tuned(engine, about, batch, options, bar)
        lengths = {"ours": draft_len, record.PLAIN: 0}
        own: dict[str, System] = {name: Ours(engine, length, waves=options.waves) for name, length in lengths.items()}
        systems = {name: system for name, system in own.items() if name in options.systems}
        systems |= others | (assisted if batch == 1 else {})
        batches = list(_batches(about.prompts, batch * options.waves, options.repetitions))
        task = bar.add_task(f"batch {batch}", total=len(systems) * (len(batches) + 1))
        advance = partial(bar.advance, task)
        race(systems, batches[:1], options.tokens, advance)  # warms up
        answers = race(systems, batches, options.tokens, advance)
        heats.append(record.Heat(batch, draft_len, batches, options.repetitions, answers))
        machine = machine.or_better(floor.measure(about.device, about.dtype))
        found |= record.figures(heats, machine, work)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _others(
    options: Namespace, about: Subject, stack: ExitStack
) -> tuple[dict[str, System], dict[str, System], dict[str, str]]:
    """All but our own: for every batch size, for batch 1 alone, and the peers' versions."""
    systems: dict[str, System] = {}
    assisted: dict[str, System] = {}
    versions: dict[str, str] = {}
    if "transformers" in options.systems:
        systems["transformers"] = Generate(about.model())
    if "transformers-assisted" in options.systems and 1 in options.batch:
        assisted["transformers-assisted"] = Generate(about.model(), **about.assistant())
    for spec in options.peer:
        words = spec.command(
            about.directory, about.dtype_name, options.threads, max(options.batch), about.context_tokens
        )
        peer = stack.enter_context(Peer(spec.name, words))
        systems[spec.name] = peer
        versions |= peer.versions
    return systems, assisted, versions


def _over_stages(options: Namespace, about: Subject, stack: ExitStack, bar: Progress) -> dict[str, Any]:
    """As `bench`, of our engine alone."""
    if not about.directory:
        raise ModelError("--stages: a made-up model has no files that other processes could load")
    links = stack.enter_context(
        stages.other_stages(about.directory, about.dtype_name, str(about.device), options.threads, options.stages)
    )
    first = load(about.directory, str(about.device), about.dtype_name, place=Place(0, options.stages))
    engine = _engine(about, first.model, max(options.batch), links, MAX_DRAFT_OVER_STAGES)

    def batches(batch: int) -> list[Batch]:
        return list(_batches(about.prompts, batch, options.repetitions))

    def tuning(batch: int) -> list[Batch]:
        return list(_batches(about.tuning, batch, 1))

    found: dict[str, Any] = _about(options, about) | {"rows": []}
    task = bar.add_task(f"{options.stages} stages", total=len(options.batch) * len(options.link_delay_ms))
    for point in stages.measure(engine, links, options, batches, tuning):
        found["rows"].append(point)
        bar.advance(task)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _about(options: Namespace, about: Subject) -> dict[str, Any]:
    return {
        "command": record.command(),
        "model": about.name,
        "dtype": about.dtype_name,
        "device": str(about.device),
        "prompts": len(about.prompts),
        "tokens": options.tokens,
        "repetitions": options.repetitions,
        "waves": options.waves,
        "machine": record.environment(about.device, options.threads),
        "versions": record.versions(),
    }


def _engine(about: Subject, model: Any, batch: int, group: Sharers | None = None, max_draft: int = MAX_DRAFT) -> Engine:
    blocks = batch * -(-(about.context_tokens + max_draft + 1) // BLOCK_TOKENS)
    return Engine(
        model,
        about.tokenizer,
        eos_ids=frozenset(),
        context_tokens=about.context_tokens,
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        max_draft=max_draft,
        group=group,
        drafter=about.drafter(blocks),
    )


def _batches(prompts: Sequence[Sequence[int]], batch: int, repetitions: int) -> Iterator[Batch]:
    """Whole batches for each repetition, going through the prompts in order and round again."""
    each = -(-_PROMPTS // batch)
    endless = cycle(prompts)
    return (list(islice(endless, batch)) for _ in range(each * repetitions))


def _tuned(engine: Engine, about: Subject, batch: int, options: Namespace, bar: Progress) -> int:
    """The draft length that wins two races on prompts that are not measured: the first finds the fastest of several, in
    the second it must be clearly faster than no drafts.

    In the service the scheduler chooses, for each request and round; one length for all is the least that it can do.
    """
    size = batch * options.waves
    batches = list(_batches(about.tuning, size, 1 if size < _PROMPTS else 2))
    task = bar.add_task(f"draft length at batch {batch}", total=len(_TRIED) * (len(batches) + 1) + 2 * _FINAL)

    def rival(lengths: Iterable[int], batches: Sequence[Batch], tokens: int) -> dict[int, list[Answer]]:
        systems = {str(length): Ours(engine, length, waves=options.waves) for length in lengths}
        answers = race(systems, batches, tokens, partial(bar.advance, task))
        return {int(name): each for name, each in answers.items()}

    rival(_TRIED, batches[:1], options.tokens // 4 + 1)
    tried = rival(_TRIED, batches, options.tokens)
    if not (best := fastest({length: record.rate(each) for length, each in tried.items()})):
        return 0
    final = rival((best, 0), list(islice(_batches(about.tuning, size, _FINAL), _FINAL)), options.tokens)
    return best if clearly_faster(final[best], final[0]) else 0


def fastest(rates: Mapping[int, float]) -> int:
    """The draft length of the greatest rate, if that is clearly above the rate without drafts; else 0. Rates are noisy,
    and the greatest of several is most likely too high."""
    best = max(rates, key=lambda length: rates[length])
    return best if rates[best] > _CLEARLY * rates[0] else 0


def clearly_faster(answers: Sequence[Answer], others: Sequence[Answer]) -> bool:
    """Whether it is so in the median of the batches, which both answered."""
    return median(other.seconds / own.seconds for own, other in zip(answers, others, strict=True)) > _CLEARLY


def _print(found: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{found['model']}, {found['dtype']} on {found['device']}: output tokens/s, prefill included")
    columns = ("system", "batch", "tokens/s", "least", "most", "tokens a round", "accepted per drafted", "step ms")
    for name in (*columns, "over floor", "outside", "a draft, in passes"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for row in found["rows"]:
        table.add_row(
            row["system"],
            str(row["batch"]),
            f"{row['tokens_per_s']:.1f}",
            *(f"{rate:.1f}" for rate in row["spread"]),
            _cell(row, "acceptance_length", ".2f"),
            _cell(row, "accepted_per_drafted", ".2f"),
            _cell(row, "step_ms", ".1f"),
            _cell(row, "step_over_floor", ".2f"),
            _cell(row, "outside_forward_share", ".1%"),
            _cell(row, "draft_token_share", ".1%"),
        )
    console.print(table)
    measured = found["floor"]
    console.print(
        f"floor: {measured['bytes_per_s'] / 1e9:.1f} GB/s read, {measured['operations_per_s'] / 1e9:.0f} GFLOP/s"
    )


def _print_stages(found: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{found['model']}, {found['dtype']} on {found['device']}, over stages: decode rounds")
    for name in ("stages", "link ms", "batch", "drafted", "tokens a round", "plain tokens/s", "tokens/s", "gain"):
        table.add_column(name, justify="right")
    table.add_column("least-most", justify="right")
    table.add_column("closed form", justify="right")
    for row in found["rows"]:
        table.add_row(
            *(str(row[name]) for name in ("stages", "link_ms", "batch", "draft_len")),
            *(f"{row[name]:.2f}" for name in ("tokens_a_round", "plain_tokens_per_s", "tokens_per_s", "gain")),
            "{:.2f}-{:.2f}".format(*row["spread"]),
            f"{row['closed_form']:.2f}",
        )
    console.print(table)


def _cell(row: Mapping[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return "" if value is None else format(value, form)
