"""Locks of directories between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptcore.builtin.local import LocalStorage, open_local
from ckptcore.builtin.local_mounts import locks_reach_all_hosts
from ckptcore.protocols import StorageOptions

pytestmark = pytest.mark.system

_HOLDER = """
import sys, time
from ckptcore.builtin.local import open_local
from ckptcore.protocols import StorageOptions
lock = open_local(sys.argv[1], StorageOptions()).lock_directory("a")
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""


def hold_in_another_process(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def is_free(storage: LocalStorage) -> bool:
    lock = storage.lock_directory("a")
    if lock is None:
        return False
    with lock:
        return True


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    storage = open_local(str(tmp_path), StorageOptions())
    with hold_in_another_process(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert not is_free(storage)
        storage.put("a/b", b"1")
        storage.delete(["a/b"])
        assert storage.list_names() == ["a/"], "a directory that another process holds does not vanish"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert is_free(storage)
    storage.put("a/b", b"1")
    storage.delete(["a/b"])
    assert storage.list_names() == []


def test_another_process_is_refused(tmp_path: Path) -> None:
    lock = open_local(str(tmp_path), StorageOptions()).lock_directory("a")
    assert lock is not None
    with lock, hold_in_another_process(tmp_path) as process:
        assert process.communicate()[0] == "refused\n"


_FORKING_HOLDER = """
import os, sys, time
from ckptcore.builtin.local import open_local
from ckptcore.protocols import StorageOptions
lock = open_local(sys.argv[1], StorageOptions()).lock_directory("a")
receive, send = os.pipe()
child = os.fork()
if child == 0:
    os.write(send, b"1")
    os.read(0, 1)
    os._exit(0)
os.read(receive, 1)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_lock_of_its_failed_parent(tmp_path: Path) -> None:
    """Otherwise the workers of a data loader would prevent a restarted trainer from saving."""
    storage = open_local(str(tmp_path), StorageOptions())
    with subprocess.Popen(
        [sys.executable, "-c", _FORKING_HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.wait()
        os.kill(child, 0)  # the child is alive
        assert is_free(storage)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_that_ends_does_not_release_locks(tmp_path: Path) -> None:
    storage = open_local(str(tmp_path), StorageOptions())
    lock = storage.lock_directory("a")
    assert lock is not None
    ended = subprocess.run(
        [sys.executable, "-c", _FORKS_AND_ASKS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["False", "False"], "held by this process"
    lock.__exit__(None, None, None)
    ended = subprocess.run(
        [sys.executable, "-c", _FORKS_AND_ASKS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["True", "True"], "the child's end did not let go what its parent holds"


_FORKS_AND_ASKS = """
import os, sys
from ckptcore.builtin.local import open_local
from ckptcore.protocols import StorageOptions
storage = open_local(sys.argv[1], StorageOptions())
lock = storage.lock_directory("a")
print(lock is not None, flush=True)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(lock is not None and storage.lock_directory("a") is None)
"""


_FORKS_IN_A_PUT = """
import errno, os, sys, threading
from ckptcore.builtin import local
from ckptcore.errors import StorageError
from ckptcore.protocols import StorageOptions
storage = local.open_local(sys.argv[1], StorageOptions())
storage.put("a", b"1")
rename = os.rename
def fork_and_fail(*paths):
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    raise OSError(errno.EIO, os.strerror(errno.EIO))
os.rename = fork_and_fail
try:
    storage.put("a", b"2")
except StorageError:
    failed = True
os.rename = rename
assert failed
again = threading.Thread(target=storage.put, args=("a", b"3"), daemon=True)
again.start()
again.join(30)
print("locked" if again.is_alive() else "put", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_during_a_put_does_not_keep_its_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS_IN_A_PUT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "put\n"
    assert (tmp_path / "a").read_bytes() == b"3"


_FORKS_WITH_OPEN_FILES = """
import os, sys
from ckptcore.builtin.local import open_local
from ckptcore.builtin.local_directories import lock_object
from ckptcore.protocols import StorageOptions
storage = open_local(sys.argv[1], StorageOptions())
storage.put("read", bytes(1 << 20))
storage.get_into("read", [(0, memoryview(bytearray(9)))])
writer = storage.open_writer("written", 4)
writer.write_at(0, b"12")
lock = storage.lock_directory("locked")
with lock, lock_object(sys.argv[1] + "/read"):
    if os.fork() == 0:
        found = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        print([path for path in found if path.startswith(sys.argv[1])], flush=True)
        try:
            writer.write_at(2, b"34")
        except ValueError:
            writer.abort()
        taken = memoryview(bytearray(9))
        storage.get_into("read", [(0, taken)])
        os._exit(0)
    os.wait()
    assert storage.lock_directory("locked") is None
writer.write_at(2, b"34")
writer.finish()
print(storage.get("written"))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs fork and /proc")
def test_a_forked_child_has_no_file_of_its_parent_open(tmp_path: Path) -> None:
    """Otherwise files that the parent deletes would still take space on the disk."""
    ended = subprocess.run(
        [sys.executable, "-c", _FORKS_WITH_OPEN_FILES, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\nb'1234'\n"


@pytest.mark.parametrize(
    ("kind", "options", "reach"),
    [
        ("lustre", "rw,flock,lazystatfs", True),
        ("lustre", "rw,localflock,lazystatfs", False),
        ("lustre", "rw,lazystatfs", False),
        ("ceph", "rw,acl", True),
        ("gpfs", "rw", True),
        ("ocfs2", "rw,data=ordered", True),
        ("ocfs2", "rw,localflocks", False),
        ("gfs2", "rw,localflocks", False),
        ("fuseblk", "rw", True),  # a local disk
        ("nfs", "rw,vers=3,local_lock=all", False),
        ("nfs4", "rw,vers=4.2,local_lock=none", False),
        ("cifs", "rw", False),
        ("beegfs", "rw", False),
        ("9p", "rw,trans=virtio", False),
        ("virtiofs", "rw", False),
        ("fuse.sshfs", "rw", False),
        ("a type of the future", "rw,flock", False),
    ],
)
def test_only_locks_that_all_hosts_see_are_trusted(kind: str, options: str, reach: bool) -> None:
    assert locks_reach_all_hosts(kind, options.split(",")) == reach
