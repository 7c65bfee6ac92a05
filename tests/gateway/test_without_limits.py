"""A system that takes no limit of a process's memory, as macOS: structures are checked nevertheless."""

import sys

from gateway.structure import Structures
from gateway.text import TextModel
from protos.v1.types_pb2 import Structure
from tests.gateway.harness import model_info

AS_ON_MACOS = """
import resource
real = resource.setrlimit
def setrlimit(what, limits):
    if what in (resource.RLIMIT_AS, resource.RLIMIT_STACK):
        raise ValueError("current limit exceeds maximum limit")
    real(what, limits)
resource.setrlimit = setrlimit
from gateway.grammars import main
main()
"""


async def test_where_memory_cannot_be_limited_structures_are_checked_nevertheless() -> None:
    structures = Structures((sys.executable, "-c", AS_ON_MACOS))
    try:
        await structures.check(Structure(json_object=True), TextModel(model_info()), "t")
    finally:
        await structures.close()
