"""Each test of this folder runs on every store there is."""

import pytest

from scheduler_service.store import Store


@pytest.fixture
def store(each_store: Store) -> Store:
    return each_store
