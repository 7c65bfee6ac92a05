"""How the core's plain data is declared. No data lives here."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A dataclass that the type checker holds to be frozen. At run time it is not, which makes it three times cheaper
    to construct; several are made for every row of every report."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
