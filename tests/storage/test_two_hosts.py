"""Two hosts with a shared directory, on file systems without locks between hosts. Leases protect the directory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from ckptcore_tools.cli.application import application
from click.testing import CliRunner

import ckptcore
from ckptcore import Checkpointer, CheckpointReader, Context
from ckptcore.builtin.local import open_local
from ckptcore.commit.conditional_put import new_claim
from ckptcore.commit.location import Location, commit_method
from ckptcore.commit.method import StorageSupport
from ckptcore.commit.root import new_save_id
from ckptcore.errors import DirectoryInUseError, SaveLostError, StepPinnedError
from ckptcore.policies import LatestN
from ckptcore.protocols import StorageOptions
from tests.ownership.fake_clock import FakeClock
from tests.storage.missing_program import check, state
from tests.storage.mounts import Mounts

pytestmark = pytest.mark.system

_OPTIONS: Final = StorageOptions(durable=False)


class Hosts(NamedTuple):
    """Paths of the same directory: on two hosts, and on the server that exports it."""

    one: Path
    two: Path
    server: Path


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Mount two views through FUSE. The kernel keeps separate locks for each view."""
    with ExitStack() as closing:
        mounts = Mounts(tmp_path, closing)
        (server := tmp_path / "server").mkdir()
        views = []
        for name in ("one", "two"):
            (view := tmp_path / name).mkdir()
            mounts.run("bindfs", str(server), str(view))
            closing.callback(subprocess.run, ["umount", "-l", str(view)], check=True)
            views.append(view)
        one, two = views
        yield Hosts(one, two, server)


@pytest.mark.lives(
    "NFS, SMB and others without locks of all hosts, from several hosts, and the server that exports them",
    "bindfs 1.14.7 twice over one directory, and the directory itself",
    "one owner of a run; pins of readers; running saves of hosts with leases",
    "see [File systems](file-systems.md#without-locks)",
)
@pytest.mark.parametrize(("first", "second"), [("one", "two"), ("one", "server"), ("server", "one")])
def test_a_requeued_job_does_not_open_next_to_the_old_one(first: str, second: str, hosts: Hosts) -> None:
    other: Path = getattr(hosts, second)
    with Checkpointer(getattr(hosts, first) / "run") as old:
        old.save_blocking(1, state(1))
        with pytest.raises(DirectoryInUseError, match="owns it"):
            Checkpointer(other / "run")
        result = CliRunner().invoke(application, ["gc", str(other / "run"), "--policy", "latest_n=1", "--yes"])
        assert "is in use" in result.output
        old.save_blocking(2, state(2))
    with Checkpointer(other / "run") as new:
        check(new.load(), 2)


@pytest.mark.parametrize("place", ["two", "server"])
def test_a_save_does_not_delete_the_running_save_of_another_host(place: str, hosts: Hosts) -> None:
    """Both hosts save to one location. The first commit wins."""

    def at(path: Path) -> Location:
        store = open_local(str(path), _OPTIONS)
        return Location(f"{path}/a", store, "a", f"file:{path}/a", support=StorageSupport(clock=FakeClock()))

    first, second = at(hosts.one), at(getattr(hosts, place))
    running = first.commit_method.begin(first, new_claim(new_save_id()), False)
    running.store.put("w", b"1")
    other = second.commit_method.begin(second, new_claim(new_save_id()), False)
    other.store.put("w", b"2")
    second.commit_method.sweep(second)
    running.commit(b"root", {})
    with pytest.raises(ckptcore.errors.CheckpointExistsError):
        other.commit(b"other", {})
    assert first.store.get("w") == b"1"


def test_a_step_that_another_host_has_pinned_is_kept(hosts: Hosts) -> None:
    with Checkpointer(hosts.one / "run", preservation_policy=LatestN(1)) as run:
        run.save_blocking(1, state(1))
        with CheckpointReader(hosts.two / "run").pin(1):
            run.save_blocking(2, state(2))
            run.wait()
            with pytest.raises(StepPinnedError):
                run.delete(1)
            check(CheckpointReader(hosts.two / "run").load(1), 1)
        run.save_blocking(3, state(3))
        run.wait()
        assert run.steps == (3,)


@pytest.mark.parametrize(("owner", "reader"), [("server", "two"), ("two", "server")])
def test_the_server_and_a_host_keep_the_pinned_steps_of_each_other(owner: str, reader: str, hosts: Hosts) -> None:
    with Checkpointer(getattr(hosts, owner) / "run", preservation_policy=LatestN(1)) as run:
        run.save_blocking(1, state(1))
        with CheckpointReader(getattr(hosts, reader) / "run").pin(1):
            run.save_blocking(2, state(2))
            run.wait()
            assert run.steps == (1, 2)


def test_an_owner_that_did_not_renew_its_lease_loses_the_run(hosts: Hosts) -> None:
    clock = FakeClock()
    process = clock.process()
    old = commit_method(open_local(str(hosts.one / "run"), _OPTIONS)).locks("run", clock=process).own()
    process.is_frozen = True
    with commit_method(open_local(str(hosts.two / "run"), _OPTIONS)).locks("run", clock=clock).own("take over") as new:
        process.is_frozen = False
        with pytest.raises(SaveLostError, match="taken over by this process"):
            old.check()
        new.check()


def test_a_job_of_one_host_saves_several_checkpoints_without_waiting(hosts: Hosts) -> None:
    context = Context(durability="none")
    for number in range(3):
        ckptcore.save(hosts.one / "a", state(number), overwrite="non-atomic", context=context)
    check(ckptcore.load(hosts.two / "a"), 2)
    ckptcore.delete(hosts.two / "a")
    assert not (hosts.server / "a").exists()
