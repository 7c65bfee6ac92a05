"""A scheduler that leads, for the tests of what can be seen of it; certificates."""

from tests.scheduler.conftest import live, store
from tests.security.conftest import certs, made_certs

__all__ = ["certs", "live", "made_certs", "store"]
