"""The key-value service of a jax.distributed job. Only this module uses a private module of JAX."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptcore.errors import PluginError

_MODULE = "jax._src.distributed"


@runtime_checkable
class KeyValueClient(Protocol):
    """Methods of the client of JAX's service (``DistributedRuntimeClient`` of jaxlib since 0.4.34).

    Keys are paths; repeated slashes are ignored. Every method can be called in any thread and
    releases the interpreter lock while it waits. Errors are RuntimeErrors whose message begins with
    a gRPC status.
    """

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Set a key. Status ALREADY_EXISTS if it is set and overwriting is not allowed."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Wait until a key is set, and return its value. Status DEADLINE_EXCEEDED after the timeout."""
        ...

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """Return the keys below a path, with their values."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Delete a key and all keys below it, if they exist."""
        ...


@dataclass(frozen=True, slots=True)
class JobService:
    """The service for one process of a job.

    Attributes:
        client: client of the service.
        rank, size: rank of this process and number of processes, as passed to
            `jax.distributed.initialize`.
    """

    client: KeyValueClient
    rank: int
    size: int


def service_of_job() -> JobService | None:
    """Return the service of the initialized JAX job, or None if no job is initialized.

    Returns None also after a shutdown, and if JAX is not imported. Thread-safe. Starts no JAX
    backend, unlike `jax.process_index` and `jax.process_count`.

    Raises:
        PluginError: if this version of JAX is not supported.
    """
    # JAX has no public access to its service. Orbax uses the same path in multihost.py.
    if sys.modules.get("jax") is None:
        return None
    try:
        state = importlib.import_module(_MODULE).global_state
        client, rank, size = state.client, state.process_id, state.num_processes
    except (ImportError, AttributeError) as error:
        raise _unsupported_version(str(error)) from error
    if client is None:
        return None
    if not isinstance(client, KeyValueClient):
        raise _unsupported_version(f"its client is a {type(client).__name__} without key-value methods")
    return JobService(client, int(rank), int(size))


def _unsupported_version(found: str) -> PluginError:
    version = getattr(sys.modules.get("jax"), "__version__", "unknown")
    return PluginError(
        f"jax {version} is not supported: ckptcore-jax expects the key-value service of a job in "
        f"{_MODULE}.global_state: {found}; upgrade ckptcore-jax, or use "
        "Context(job=JobOptions(coordinator=...)) with another coordinator"
    )
