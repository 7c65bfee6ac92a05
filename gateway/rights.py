"""The rights that an API key may give. How keys are checked is in keys.py."""

from enum import StrEnum


class Right(StrEnum):
    GENERATE = "generate"  # requests of one's own tenant
    ADMIN = "admin"  # figures of the whole service, and requests of every tenant
