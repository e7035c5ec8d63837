"""Fixtures of the tests on object stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.object_stores.clients import Client
from tests.object_stores.stores import STORES, ObjectStore


@pytest.fixture(scope="session", params=sorted(STORES))
def object_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Start each object store."""
    scheme: str = request.param
    with STORES[scheme](tmp_path_factory.mktemp(scheme)) as store:
        yield store


@pytest.fixture(scope="session")
def warm() -> Iterator[Client]:
    """Start the program whose children are killed."""
    with Client() as running:
        yield running
