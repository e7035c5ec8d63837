"""The key-value service of a jax.distributed job: the one place that reaches for what JAX keeps private."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptcore.errors import PluginError

__all__ = ["JobService", "KeyValueClient", "service_of_job"]

_MODULE = "jax._src.distributed"


@runtime_checkable
class KeyValueClient(Protocol):
    """What is used of the client of JAX's service (jaxlib: ``DistributedRuntimeClient``), in all versions since 0.4.34.

    Keys are paths; a slash more or less makes no other key. Every method is safe in any thread, waits without the interpreter's
    lock, and raises a RuntimeError that begins with the name of a gRPC status.
    """

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Set a key; ALREADY_EXISTS if it is set and that is not allowed."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """The value of a key, once it is set; DEADLINE_EXCEEDED if that takes longer."""
        ...

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """The keys below a path, and their values."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Delete a key and all below it, if there are any."""
        ...


@dataclass(frozen=True, slots=True)
class JobService:
    """The service as one process of a job sees it.

    Attributes:
        client: of the service.
        rank, size: which process of how many this is, as `jax.distributed.initialize` was told.
    """

    client: KeyValueClient
    rank: int
    size: int


def service_of_job() -> JobService | None:
    """The service of the job for which `jax.distributed.initialize` was called; None where it was not, or was shut down.

    Starts no backend of JAX, as `jax.process_index` and `jax.process_count` would. Any thread.

    Raises:
        PluginError: this version of JAX keeps its service elsewhere.
    """
    # JAX gives no public way to its service. Orbax goes this one, too, in multihost.py.
    if sys.modules.get("jax") is None:
        return None
    try:
        state = importlib.import_module(_MODULE).global_state
        client, rank, size = state.client, state.process_id, state.num_processes
    except (ImportError, AttributeError) as error:
        raise _unknown(str(error)) from error
    if client is None:
        return None
    if not isinstance(client, KeyValueClient):
        raise _unknown(f"its client is a {type(client).__name__} without the methods of a key-value service")
    return JobService(client, int(rank), int(size))


def _unknown(found: str) -> PluginError:
    version = getattr(sys.modules.get("jax"), "__version__", "unknown")
    return PluginError(
        f"jax {version} does not keep the key-value service of a job in {_MODULE}.global_state, where the versions from 0.4.34 "
        f"have it: {found}; give Context(job=JobOptions(coordinator=...)) a coordinator of your own, or install a version of ckptcore-jax "
        "that knows this one of JAX"
    )
