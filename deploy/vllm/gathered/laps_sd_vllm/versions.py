"""The versions of vLLM that this was tested with, and how. Neither vLLM nor torch is imported here."""

TESTED = {
    "0.32": "the real model on the CPU, and the toy executor",
    "0.33": "the toy executor, on its Python sources: there is no build of it for CPUs",
}
SUPPORTED = " and ".join(TESTED)  # for sentences


def supported(version: str) -> bool:
    """Whether this version was tested: `0.32.0`, `0.32.1+cpu`, not `0.34.0`."""
    return ".".join(version.split("+")[0].split(".")[:2]) in TESTED


def check(version: str) -> None:
    """Raises Unsupported."""
    if not supported(version):
        raise Unsupported(f"vLLM {version} is not supported: LAPS-SD was tested with {SUPPORTED}")


class Unsupported(ValueError):
    """This vLLM, or this setting of it, is none that LAPS-SD can order. The message is one sentence for a person."""
