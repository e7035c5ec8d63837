"""The servers that every suite runs on: one entry for each, and which of their tests are quick."""

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
    server_kind(): S3,  # MiniStack, or what CKPTCORE_S3_SERVER names: Ceph
    "moto": MOTO,
    "strict-gcs": STRICT_GCS,
    "fake-gcs-server": FAKE_GCS_SERVER,
}
"""By name. A process starts each where a test first asks for it, and stops it in the end."""


def open_storage(location: str) -> StorageBackend:
    """The storage at a location that a sample gave."""
    opener = installed_plugins().storage(location.partition("://")[0])
    return opener(location, StorageOptions(durable=False))


def quick_sample(
    items: Sequence[pytest.Item | pytest.Collector], *, one_of: int, long: Sequence[str] = ()
) -> list[pytest.Item | pytest.Collector]:
    """Mark tests on servers as system tests, and all but a fixed sample as slow. Leave slow ones out without `--slow`.

    A number made of the name of a test decides if it is in the sample.

    Args:
        items: tests of one function; those without a server in their name stay as they are.
        one_of: how many tests there are for each that stays quick.
        long: tests of which none stays quick.
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
