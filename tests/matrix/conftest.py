"""Marks of the matrix: combinations with a storage on a server are system tests."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from ckptcore_testing import StorageSample


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Mark the combinations with a server."""
    made = yield
    for item in made if isinstance(made, list) else ():
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            storage = item.callspec.params.get("storage")
            if isinstance(storage, StorageSample) and storage.costly:
                item.add_marker(pytest.mark.system)
    return made
