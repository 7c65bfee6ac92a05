"""The build backend of the client's distribution: setuptools', run on sources that are gathered from the repository.

`gathered` gets the package `laps_sd` with the client alone, and in `laps_sd._protos` those modules of `protos` that the
client needs: nobody who only calls a service gets a top-level package `protos`. The generated code is that of
protos/v1; the names of its descriptor files stay, so that a process may load it beside the service's. An sdist holds
`gathered`, and is built without the repository.
"""

import re
import shutil
import tomllib
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
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GATHERED = HERE / "gathered"
CLIENT = ("laps_sd/__init__.py", "laps_sd/py.typed", "laps_sd/client/*.py")
WIRE = ("protos/__init__.py", "protos/channels.py", "protos/errors.py", "protos/times.py", "protos/v1/*.py*")
_PROTOS = re.compile(r"^(from |import )protos\b|(?<=')protos(?=\.v1\.\w+_pb2')", re.MULTILINE)


def gather() -> None:
    """Makes `gathered` anew; in an unpacked sdist it is there already."""
    if not (REPOSITORY / "protos" / "v1").is_dir():
        return
    shutil.rmtree(GATHERED, ignore_errors=True)
    for pattern in (*CLIENT, *WIRE):
        for file in sorted(REPOSITORY.glob(pattern)):
            where = file.relative_to(REPOSITORY)
            copy = GATHERED / ("laps_sd/_protos" / where.relative_to("protos") if where.parts[0] == "protos" else where)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_PROTOS.sub(r"\1laps_sd._protos", file.read_text(encoding="utf-8")), encoding="utf-8")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (GATHERED / "VERSION").write_text(project["version"] + "\n")
    shutil.copy(REPOSITORY / "LICENSE", GATHERED)


gather()  # each hook runs in a process of its own, and each needs the sources
