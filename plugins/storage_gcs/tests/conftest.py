"""What the tests of this plugin have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ckptcore_gcs.testing.strict import StrictGcs


@pytest.fixture
def gcs() -> Iterator[StrictGcs]:
    """A strict GCS with one bucket, ``bucket``."""
    with StrictGcs(["bucket"]) as server:
        yield server
