"""Steps in the memory of a job's hosts, with copies on other hosts.

peer_memory     `PeerMemory`: saves steps to memory, in front of a directory
storage         the memory of a job as a storage; its readers and writers
joining         how a job takes over the memory that its previous incarnation left
copies          makes copies again whose hosts were lost
session         the servers and the view as one process uses them; connections have the requests
views           the members of a job's memory, and which of them hold copies
server          the memory server of a host; `host_memory` is what it holds, and `starting` starts it
messages        frames on an authenticated connection
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptcore_recovery.peers.peer_memory import PeerMemory

__all__ = ["PeerMemory"]


def __getattr__(name: str) -> object:
    """Import `PeerMemory` at its first use: the server of a spare host, which jobs wait for, needs none of it."""
    if name != "PeerMemory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ckptcore_recovery.peers.peer_memory import PeerMemory

    return PeerMemory
