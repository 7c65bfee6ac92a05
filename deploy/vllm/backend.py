"""The build backend of the distribution for vLLM: setuptools', run on sources that are gathered from the repository.

`gathered` gets the package `laps_sd_vllm`, and in `laps_sd_vllm._core` what of the scheduler and of the worker it uses:
the core, the predictor, the simulator and the model of costs. So no other top-level name of ours enters the environment
of vLLM. An sdist holds `gathered`, and is built without the repository.
"""

import ast
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_sdist",
    "build_wheel",
    "gather",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GATHERED = HERE / "gathered"
OWN = ("laps_sd_vllm/*.py", "laps_sd_vllm/py.typed")
# Packages that are brought whole, since some of their modules are found by name; of the others, what is imported.
WHOLE = ("scheduler_service/core/**/*.py", "scheduler_service/predictor/*.py")
OURS = ("scheduler_service", "worker_service")
_IMPORT = re.compile(r"^(\s*(?:from|import) )(?=(?:scheduler_service|worker_service)\b)", re.MULTILINE)


def needed(repository: Path) -> list[Path]:
    """What of the scheduler and the worker the plug-in uses, relative to the repository, packages included."""
    todo = [file for pattern in (OWN[0], *WHOLE) for file in repository.glob(pattern)]
    found = set[Path]()
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += [each for name in _imported(file) for each in _files(repository, name)]
    within = {each.relative_to(repository) for each in found}
    return sorted(each for each in within if each.parts[0] in OURS)


def _imported(file: Path) -> Iterator[str]:
    """Names of modules, and of what is taken from modules, which may be modules, too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _files(repository: Path, name: str) -> Iterator[Path]:
    """The module of that name, as far as it is one of OURS, and the packages that it is in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1 if parts[0] in OURS else 0):
        place = repository.joinpath(*parts[:depth])
        yield from filter(Path.is_file, (place / "__init__.py", place.with_suffix(".py")))


def gather(gathered: Path = GATHERED) -> None:
    """Makes it anew; in an unpacked sdist it is there already."""
    if not (REPOSITORY / "scheduler_service" / "core").is_dir():
        return
    shutil.rmtree(gathered, ignore_errors=True)
    own = [file.relative_to(REPOSITORY) for pattern in OWN for file in REPOSITORY.glob(pattern)]
    for file, below in [*((each, "") for each in own), *((each, "laps_sd_vllm/_core") for each in needed(REPOSITORY))]:
        copy, text = gathered / below / file, (REPOSITORY / file).read_text(encoding="utf-8")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_IMPORT.sub(r"\1laps_sd_vllm._core.", text), encoding="utf-8")
    (gathered / "laps_sd_vllm" / "_core" / "__init__.py").write_text('"""Parts of LAPS-SD that the plug-in uses."""\n')
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (gathered / "VERSION").write_text(project["version"] + "\n")
    shutil.copy(REPOSITORY / "LICENSE", gathered)


gather()  # each hook runs in a process of its own, and each needs the sources
