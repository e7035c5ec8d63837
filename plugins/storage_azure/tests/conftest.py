"""Azurite for tests, started once per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ckptcore_azure.testing import Azurite, azurite


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Azurite in its own process."""
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server
