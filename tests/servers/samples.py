"""The servers of the test suites, and the sample of tests that are not slow."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import pytest
from ckptcore_azure.testing import SAMPLE as AZURITE
from ckptcore_gcs.testing import FAKE_GCS_SERVER
from ckptcore_gcs.testing import SAMPLE as STRICT_GCS
from ckptcore_s3.testing import MOTO, server_kind
from ckptcore_s3.testing import SAMPLE as S3
from ckptcore_testing import StorageSample

from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageBackend, StorageOptions

SERVERS: Final[Mapping[str, StorageSample]] = {
    "azurite": AZURITE,
    server_kind(): S3,  # MiniStack, or Ceph if CKPTCORE_S3_SERVER selects it
    "moto": MOTO,
    "strict-gcs": STRICT_GCS,
    "fake-gcs-server": FAKE_GCS_SERVER,
}
"""Servers by name. A process starts a server when a test first needs it, and stops it at the end."""


def open_storage(location: str) -> StorageBackend:
    """Return the storage at a location of a sample."""
    opener = installed_plugins().storage(location.partition("://")[0])
    return opener(location, StorageOptions(durable=False))


def quick_sample(
    items: Sequence[pytest.Item | pytest.Collector], *, one_of: int, long: Sequence[str] = ()
) -> list[pytest.Item | pytest.Collector]:
    """Mark tests on servers as system tests, and all but a fixed sample as slow. Leave slow ones out without `--slow`.

    A checksum of the name of a test decides if the test is in the sample.

    Args:
        items: tests of one function. Tests without a server in their name are unchanged.
        one_of: the number of tests for each test in the sample.
        long: names of tests that are never in the sample.
    """
    kept = []
    for item in items:
        if any(name in item.name for name in SERVERS):
            item.add_marker(pytest.mark.system)
            if zlib.crc32(item.name.encode()) % one_of or item.name.partition("[")[0] in long:
                if not item.config.getoption("slow"):
                    continue
                item.add_marker(pytest.mark.slow)
        kept.append(item)
    return kept
