"""What a scheduler has learned, as bytes for the store, and back. It neither reads nor writes them.

One zip of numpy arrays behind a checksum: JSON in the array `header`, the predictor's window and model beside it.
Nothing in it is code, and the size is bounded by the window's: 8 MB before compression.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from scheduler_service.core.beliefs import FleetAcceptance, FleetLength
from scheduler_service.core.probed import FleetProbe
from scheduler_service.predictor.model import Model
from scheduler_service.predictor.window import EMPTY, FEATURES_VERSION, UNREADABLE, Snapshot, Window, pack, unpack

SCHEMA = 1  # of this file; another one is not read

_LENGTH = TypeAdapter(FleetLength)
_ACCEPTANCE = TypeAdapter(FleetAcceptance)
_PROBE = TypeAdapter(FleetProbe)


class UnreadableLessons(Exception):
    """It is damaged, or another version wrote it. The leader then begins as if nothing had been learned."""


@dataclass(frozen=True, slots=True)
class Learned:
    """`examples` and `model` are the predictor's; `version` counts its models. `served`: fingerprint of the model whose
    answers taught all of this; "": it was stored before fingerprints were."""

    length: FleetLength
    acceptance: FleetAcceptance
    examples: Snapshot = EMPTY
    model: Model | None = None
    version: int = 0
    probe: FleetProbe = field(default_factory=FleetProbe)
    served: str = ""

    def encode(self) -> bytes:
        """Takes some 0.1 s for a full window, most of it outside the interpreter's lock."""
        header = {
            "schema": SCHEMA,
            "features": FEATURES_VERSION,
            "version": self.version,
            "served": self.served,
            "length": _LENGTH.dump_python(self.length, mode="json"),
            "acceptance": _ACCEPTANCE.dump_python(self.acceptance, mode="json"),
            "probe": _PROBE.dump_python(self.probe, mode="json"),
        }
        arrays = {f"window.{name}": array for name, array in Window.of(self.examples).arrays().items()}
        if self.model is not None:
            arrays |= {f"model.{name}": array for name, array in self.model.arrays().items()}
        return pack({"header": np.array(json.dumps(header, allow_nan=False)), **arrays}, compress=True)


def decode(packed: bytes) -> Learned:
    """Raises UnreadableLessons. Of features of another version only the fleet's means are taken."""
    try:
        arrays = unpack(packed)
        header: dict[str, Any] = json.loads(str(arrays["header"]))
        if header["schema"] != SCHEMA:
            raise UnreadableLessons(f"schema {header['schema']!r}, not {SCHEMA}")
        length, acceptance = (
            _LENGTH.validate_python(header["length"]),
            _ACCEPTANCE.validate_python(header["acceptance"]),
        )
        probe = _PROBE.validate_python(header.get("probe", {}))  # earlier versions knew none
        served = str(header.get("served", ""))  # nor this
        if header["features"] != FEATURES_VERSION:
            return Learned(FleetLength(length.finished, length.tokens), acceptance, served=served)
        window = Window.of_arrays(_part(arrays, "window."))
        model = Model.of_arrays(part) if (part := _part(arrays, "model.")) else None
        return Learned(length, acceptance, window.snapshot(), model, int(header["version"]), probe, served)
    except UNREADABLE as error:
        raise UnreadableLessons(str(error)) from error


def _part(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
