"""The memory server of this host: where it keeps its files, how it is started, and how processes find it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from ckptcore.errors import StorageError
from ckptcore_recovery.peers.connections import ServerConnections

DIRECTORY_VARIABLE: Final = "CKPTCORE_PEER_MEMORY"
"""Environment variable with the directory of all memory servers of a host."""

_JOB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
LOOPBACK: Final = "127.0.0.1"
"""The default interface of a process. It uses a server that listens elsewhere."""

TOKEN_BYTES: Final = 32
"""The bytes of the secret of a job."""

_START_SECONDS: Final = 60.0
_FIRST_PAUSE_SECONDS: Final = 0.05


class LocalServer(NamedTuple):
    """The memory server of this host.

    Attributes:
        directory: the directory with its files.
        id: identifies its memory.
        interface: the address that it listens on.
        port: its port.
        token: the secret of the job.
    """

    directory: Path
    id: str
    interface: str
    port: int
    token: bytes


def server_directory(job: str, base: str | None = None) -> Path:
    """Return the directory of a job's memory on this host.

    Args:
        job: the name of the job.
        base: the directory of all jobs; None: the default.

    Raises:
        StorageError: the name could be a path, or the default is a relative path.
    """
    given = os.environ.get(DIRECTORY_VARIABLE) or f"/dev/shm/ckptcore-{os.getuid()}"
    if not os.path.isabs(given):
        raise StorageError(
            f"{DIRECTORY_VARIABLE}={given}: expected an absolute path, because processes of a host have different "
            "working directories"
        )
    if _JOB_NAME.fullmatch(job) is None:
        raise StorageError(
            f"invalid name of a job: {job[:80]!r}; expected letters, digits, '_', '.' and '-', at most 100"
        )
    return Path(base or given) / job


def find_server(job: str, base: str | None = None) -> LocalServer | None:
    """Return the memory server of this host, or None if none was started. It may have ended without cleaning up.

    Raises:
        StorageError: another user owns the directory, or it cannot be read, or is damaged.
    """
    directory = server_directory(job, base)
    try:
        if os.stat(directory).st_uid != os.getuid():
            raise StorageError(
                f"{directory} belongs to another user. Its memory can be read by its user alone. To save, use another "
                f"directory: set {DIRECTORY_VARIABLE}"
            )
        described = read_description(directory)
        token = read_token(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as error:
        raise damaged_memory(directory, error) from error
    except PermissionError as error:
        raise StorageError(
            f"{directory} cannot be read: {error.strerror}. Its memory can be read by its user alone"
        ) from error
    return LocalServer(directory, described["id"], described["interface"], described["port"], token)


def read_description(directory: Path) -> dict[str, Any]:
    """Return the description of the last server of a directory.

    Raises:
        FileNotFoundError: there was none.
        StorageError: the description is damaged.
    """
    data = (directory / "server.json").read_bytes()
    try:
        described: dict[str, Any] = json.loads(data)
        member_id, interface, port = (described[name] for name in ("id", "interface", "port"))
        if not isinstance(member_id, str) or not isinstance(interface, str):
            raise TypeError("expected an id and an interface")
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError(f"expected a port, found {str(port)[:80]!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_memory(directory, ValueError(f"server.json: {error!r}")) from error
    return described


def read_token(directory: Path) -> bytes:
    """Return the secret of the job in a directory.

    Raises:
        FileNotFoundError: there is none.
        StorageError: it is damaged.
    """
    token = (directory / "token").read_bytes()
    if len(token) != TOKEN_BYTES:
        raise damaged_memory(directory, ValueError(f"token: expected {TOKEN_BYTES} bytes, found {len(token)}"))
    return token


def damaged_memory(directory: Path, error: Exception) -> StorageError:
    """Return the error for the files of a memory that cannot be read."""
    return StorageError(
        f"the memory in {directory} is damaged: {error}. Remove this directory, and start the job again: what it had "
        "comes from other hosts, or from the directory of the run"
    )


def ensure_server(
    job: str, *, limit: int, interface: str, idle_seconds: float, base: str | None = None
) -> tuple[LocalServer, ServerConnections]:
    """Connect to the memory server of this host. Start it in a session of its own if it does not run.

    Args:
        job: the name of the job.
        limit: the maximum bytes in its memory.
        interface: the address to listen on; a server that runs already listens on it, too. 127.0.0.1 means the
            address of the server that runs, or ran last.
        idle_seconds: the server ends after this time without a connection.
        base: see `server_directory`.

    Raises:
        StorageError: it cannot be started, or the address does not belong to this host.
    """
    deadline = time.monotonic() + _START_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while (running := _running_server(job, base)) is None:
        line, errors = _start_server(server_directory(job, base), limit, interface, idle_seconds)
        if line == "ready" and time.monotonic() < deadline:
            continue  # otherwise it ends as soon as it is ready
        if line != "already running" or time.monotonic() > deadline:
            reason = errors.read_text(errors="replace").strip().splitlines()[-1:] or [line or "no message"]
            raise StorageError(
                f"the memory server in {server_directory(job, base)} cannot be started: {reason[0]}; see {errors}"
            )
        time.sleep(pause)  # another process starts it, or it is about to end
        pause *= 2
    local, own = running
    if interface not in (LOOPBACK, local.interface):  # the last start of the job had another one
        answer, _ = own.call({"op": "listen", "interface": interface})
        local = local._replace(interface=interface, port=answer["port"])
    return local, own


def _running_server(job: str, base: str | None) -> tuple[LocalServer, ServerConnections] | None:
    """Connect to the memory server of this host if it answers."""
    described = find_server(job, base)
    if described is None:
        return None
    connections = ServerConnections(described.interface, described.port, described.token)
    try:
        status, _ = connections.call({"op": "status"})
    except StorageError:
        return None  # it was killed; the next server continues with its files
    if status["id"] != described.id:
        connections.close()
        return None
    return described, connections


def log_of(directory: Path) -> Path:
    """Return the file with the errors of the server of a directory."""
    return directory.parent / f"{directory.name}.log"


def _open_log(errors: Path) -> BinaryIO:
    """Create the directory of all jobs, and open the file with the errors of a server.

    Raises:
        StorageError: the directory cannot be written, or another user owns it, who could put links into it.
    """
    base = errors.parent
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        if base.lstat().st_uid in (os.getuid(), 0):
            return open(errors, "ab", opener=lambda path, flags: os.open(path, flags, mode=0o600))
    except OSError as error:
        reason = "it is no directory" if isinstance(error, FileExistsError) else error.strerror
        raise StorageError(
            f"{base} cannot have the memory of this host: {reason}. Set {DIRECTORY_VARIABLE} to a directory in "
            "a memory file system that this user may write"
        ) from error
    raise StorageError(
        f"{base} belongs to another user, who could replace the memory in it. Remove it, or set "
        f"{DIRECTORY_VARIABLE} to a directory of your own"
    )


def _start_server(directory: Path, limit: int, interface: str, idle_seconds: float) -> tuple[str, Path]:
    """Start a server in a session of its own. Return the line that it printed, and the file with its errors.

    Raises:
        StorageError: see `_open_log`.
    """
    command = [
        sys.executable, "-m", "ckptcore_recovery.peers.server", str(directory), "--limit", str(limit),
        "--interface", interface, "--idle-seconds", str(idle_seconds), "--background",
    ]  # fmt: skip
    import subprocess  # here, because the server uses this module, and jobs wait for its start

    errors = log_of(directory)
    with _open_log(errors) as log:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        assert started.stdout is not None  # a pipe
        with started.stdout:
            line = started.stdout.readline().decode().strip()  # the server itself prints it; the process ends earlier
        started.wait(_START_SECONDS)
    return line, errors
