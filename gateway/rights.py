"""What an API key may allow. How keys are checked is in keys.py."""

from enum import StrEnum


class Right(StrEnum):
    GENERATE = "generate"  # requests of one's own tenant
    ADMIN = "admin"  # figures of the whole service, and requests of every tenant
