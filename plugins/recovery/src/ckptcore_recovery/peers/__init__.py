"""Steps in the memory of a job's hosts, with copies on other hosts.

peer_memory     `PeerMemory`: saves steps to memory, in front of a directory
storage         the memory of a job as a storage
blobs           readers and writers of large objects; `fragments` has the erasure code
joining         how a job takes over the memory that its previous incarnation left; `discovery` finds it
copies          makes copies and fragments again whose hosts were lost
lost_steps      the steps that are left if more hosts were lost than the memory survives
spreading       requests to all members, which servers pass on in a tree
session         the servers and the view as one process uses them; connections have the requests
joined_jobs     the jobs whose memory this process uses
views           the members of a job's memory, and which of them hold entries and blobs
server          the memory server of a host: its lifetime and its connections; `starting` starts it
request_handler answers the requests to a server; `host_memory` is what it holds
memory_files    the files of that memory
messages        frames on an authenticated connection
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptcore_recovery.peers.fragments import ErasureCode
    from ckptcore_recovery.peers.peer_memory import PeerMemory

__all__ = ["ErasureCode", "PeerMemory"]


def __getattr__(name: str) -> object:
    """Import names at their first use: the server of a spare host, which jobs wait for, needs none of it."""
    if name == "ErasureCode":
        from ckptcore_recovery.peers.fragments import ErasureCode

        return ErasureCode
    if name == "PeerMemory":
        from ckptcore_recovery.peers.peer_memory import PeerMemory

        return PeerMemory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
