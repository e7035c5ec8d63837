"""Hooks of the plugin: storage for ``peers://`` URLs, which `PeerMemory` uses and the command line reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions


class PeersPlugin:
    """Opens ``peers://JOB/DIRECTORY`` on a host of a job."""

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Openers by scheme."""
        return {"peers": _open}


def _open(url: str, options: StorageOptions) -> StorageBackend:
    from ckptcore_recovery.peers.storage import open_storage

    return open_storage(url, options)


PLUGIN: Final = PeersPlugin()
"""The entry point."""
