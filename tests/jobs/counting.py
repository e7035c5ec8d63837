"""A plugin with a storage that counts the bytes that a process writes and reads. It has its own URL scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckptcore_testing import FaultPlan, with_faults

import ckptcore
from ckptcore.builtin.local import open_local
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

_BLOCK_BYTES: Final = 1 << 20
"""Bytes of a block with one checksum. Blocks are read whole."""

_DESCRIPTION_BYTES: Final = 256 << 10
"""Limit of the metadata of the few test arrays in headers and indices. Smaller than one replica."""


class CountingPlugin:
    """A plugin that opens local directories as ``counted://`` URLs."""

    def __init__(self) -> None:
        self.plan = FaultPlan()

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Return the opener of the scheme ``counted``."""
        return {"counted": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open a directory."""
        return with_faults(open_local(url.replace("counted://", "file://", 1), options), self.plan)


@dataclass(frozen=True)
class Counted:
    """Bytes counted by a process so far.

    Attributes:
        written: bytes in objects with arrays and layout metadata, without the root and its tables.
        read: bytes of all objects.
    """

    written: int
    read: int


class Counting:
    """A Context that counts bytes, with its URLs and its counts."""

    def __init__(self, **job: Any) -> None:
        self._plugin = CountingPlugin()
        self.context = ckptcore.Context(
            plugins=ckptcore.context.PluginOptions(extra=[self._plugin]),
            durability="none",
            job=ckptcore.context.JobOptions(**job),
        )

    def url(self, path: Path) -> str:
        """The URL of a directory."""
        return f"counted://{path}"

    def counted(self) -> Counted:
        """Return the counts so far."""
        plan = self._plugin.plan
        written = sum(
            operation.nbytes
            for operation in plan.operations
            if operation.name in ("put", "write_at")
            and not operation.keys[0].rpartition("/")[2].startswith("checkpoint.")
        )
        return Counted(written, plan.bytes_read)


def assert_frugal(results: Sequence[Any], layout: str, *, shared: bool) -> None:
    """Assert that a job wrote every byte once, and that each process read only the bytes that it needed.

    A box can begin and end within a block, and the rest of that block is read too. So up to two more blocks are allowed
    for each box of at least one block. Smaller boxes are contiguous.

    Args:
        results: by rank. ``whole`` has the bytes of all arrays. For each layout, ``written`` has the written bytes, and
            ``reads`` has, for each load, the sizes of the ``needed`` boxes and the bytes that were ``read``.
        layout: the name of the layout.
        shared: True if replicas share the writes, so that each process writes about as many bytes.
    """
    whole = results[0]["whole"]
    counts = [of_rank["layouts"][layout] for of_rank in results]
    written = [count["written"] for count in counts]
    assert whole <= sum(written) <= whole + _DESCRIPTION_BYTES, f"{layout}: {written} of {whole}"
    if shared:
        mean = sum(written) / len(written)
        assert 0.9 * mean <= min(written) and max(written) <= 1.1 * mean, f"{layout}: {written}"
    for rank, count in enumerate(counts):
        for number, read in enumerate(count["reads"]):
            blocks = 2 * sum(nbytes >= _BLOCK_BYTES for nbytes in read["needed"])
            needed = sum(read["needed"])
            most = needed + blocks * _BLOCK_BYTES + _DESCRIPTION_BYTES
            assert needed <= read["read"] <= most, f"{layout}: load {number} on rank {rank}: {read}, at most {most}"
            assert number == 0 or most < whole, "a load of everything would pass"
