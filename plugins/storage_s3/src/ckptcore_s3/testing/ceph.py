"""A local Ceph cluster: one monitor, one storage daemon, and the RADOS Gateway, which implements S3.

Requires the Debian packages ``ceph-mon``, ``ceph-osd``, ``ceph-common`` and ``radosgw``, but no
service manager. As a program, ``python -m ckptcore_s3.testing.ceph DIRECTORY PORT ACCESS_KEY
SECRET_KEY``, this module runs the cluster until it is terminated.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from ckptcore_testing.servers import Server, ServerCommand, free_port, serve

PROGRAMS: Final = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
"""Programs that must be installed."""

_SECONDS_TO_START: Final = 300.0
_SECONDS_TO_END: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1

_CONFIGURATION: Final = """
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = v2:127.0.0.1:{monitor_port}
public_addr = 127.0.0.1
public_network = 127.0.0.0/8
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_cluster_mode = crc
ms_service_mode = crc
ms_client_mode = crc
ms_mon_cluster_mode = crc
ms_mon_service_mode = crc
ms_mon_client_mode = crc
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
bluestore_block_size = {disk_bytes}
osd_memory_target = 1073741824
mon_data = {directory}/mon
osd_data = {directory}/osd
run_dir = {directory}
crash_dir = {directory}
admin_socket = {directory}/$name.asok
log_file = {directory}/$name.log

[client.rgw.a]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_data = {directory}/rgw
"""
"""Configuration of a cluster without replication, for one machine.

Messages are not encrypted, because connections in `secure` mode need keys.
"""

_DISK_BYTES: Final = 8 << 30
"""Capacity of the disk, a sparse file."""


@contextmanager
def serve_ceph(directory: Path, access_key: str, secret_key: str) -> Iterator[Server]:
    """Run a cluster while the context is entered.

    The cluster is empty at first, and takes about 20 seconds to start.

    Args:
        directory: an existing empty directory. Its path must be short, because it contains sockets.
        access_key, secret_key: credentials of the only user. The gateway checks signatures.

    Raises:
        RuntimeError: if the cluster does not start, or a program is not installed.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise RuntimeError(
            f"cannot start Ceph: {', '.join(missing)} not found; on Debian, run apt-get "
            "install --no-install-recommends ceph-common ceph-mon ceph-osd radosgw"
        )

    def command(port: int) -> ServerCommand:
        arguments = [sys.executable, "-m", __name__, str(directory), str(port), access_key, secret_key]
        return ServerCommand(arguments, {})

    with serve(command, directory, timeout_seconds=_SECONDS_TO_START) as server:
        yield server


def _run(directory: Path, port: int, access_key: str, secret_key: str) -> None:
    """Create a cluster in an empty directory, and run it until a signal or the exit of a daemon."""
    configuration = directory / "ceph.conf"
    fsid, monitor_port = uuid.uuid4(), free_port()
    configuration.write_text(
        _CONFIGURATION.format(
            fsid=fsid, monitor_port=monitor_port, directory=directory, port=port, disk_bytes=_DISK_BYTES
        )
    )
    for name in ("mon", "osd", "rgw"):
        (directory / name).mkdir()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    of_cluster = ["--conf", str(configuration)]
    monitors = str(directory / "monmap")
    _do("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{monitor_port}]", "--fsid", str(fsid), monitors)
    _do("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, *of_cluster)
    with ExitStack() as stack:
        stack.enter_context(_daemon(ended, "ceph-mon", "-i", "a", "-f", *of_cluster))
        disk = str(uuid.uuid4())
        _do("ceph", *of_cluster, "--connect-timeout", "60", "osd", "new", disk)
        _do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk, *of_cluster)
        stack.enter_context(_daemon(ended, "ceph-osd", "-i", "0", "-f", *of_cluster))
        user = ["--uid=testing", "--display-name=testing", f"--access-key={access_key}", f"--secret-key={secret_key}"]
        _do("radosgw-admin", *of_cluster, "user", "create", *user)  # before the gateway accepts requests
        stack.enter_context(_daemon(ended, "radosgw", "-n", "client.rgw.a", "-f", *of_cluster))
        ended.wait()


def _do(*arguments: str) -> None:
    subprocess.run(arguments, check=True, timeout=_SECONDS_TO_START, stdout=subprocess.DEVNULL)


@contextmanager
def _daemon(ended: threading.Event, *arguments: str) -> Iterator[None]:
    # Safe: only watcher threads run during the fork, and they hold no lock that the child needs.
    process = subprocess.Popen(arguments, preexec_fn=_die_with_parent)  # noqa: PLW1509

    def watch() -> None:
        process.wait()
        ended.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
        watcher.join()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(arguments: Sequence[str]) -> None:
    directory, port, access_key, secret_key = arguments
    _run(Path(directory), int(port), access_key, secret_key)


if __name__ == "__main__":
    _main(sys.argv[1:])
