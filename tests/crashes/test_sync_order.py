"""The order of syncs of a save to a local disk, from strace. Everything is durable before the commit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crashes.disk import CALLS, Call, calls_in
from tests.crashes.test_kill_at_each_call import SCENARIOS
from tests.crashes.tracing import Saver, needs_strace


def _traced(name: str, warm: Saver, directory: Path) -> tuple[Sequence[Call], str]:
    """Return the system calls of a save, and its location."""
    needs_strace()
    location = directory / "new" / "run" / "step_1"
    SCENARIOS[name].prepare(location)
    log = directory / "trace"
    options = ("-y", "-xx", "-s", "100000000", "-e", f"trace={','.join(CALLS)}")
    assert warm.traced(SCENARIOS[name].task, str(location), log, *options) == 0
    return list(calls_in(log)), str(location)


def _publishing(calls: Sequence[Call], location: str) -> tuple[int, str]:
    """Return the number of the rename that commits, and the directory that it renames."""
    renames = [
        (number, call) for number, call in enumerate(calls) if "rename" in call.name and call.paths[-1] == location
    ]
    (number, call) = renames[-1]
    return number, call.paths[0]


@pytest.mark.parametrize(
    "name",
    [name for name in SCENARIOS if not name.startswith("delete") and "threads" not in name and "beside" not in name],
)
def test_nothing_is_committed_before_it_is_durable(name: str, warm: Saver, tmp_path: Path) -> None:
    calls, location = _traced(name, warm, tmp_path)
    committed, hidden = _publishing(calls, location)
    before, after = calls[:committed], calls[committed + 1 :]
    if "without durability" in name:
        assert not [call for call in calls if call.name in ("fsync", "fdatasync")]
        return
    written = {call.paths[0] for call in before if call.name in ("write", "pwrite64", "fallocate")}
    assert len(written) >= 2 and not [path for path in written if not path.startswith(hidden + "/")]
    for path in written:
        touched = [call.name for call in before if path in call.paths and "rename" not in call.name]
        assert touched[-1] == "fdatasync", f"{path} was changed after its last sync"
    directories = {hidden}
    for path in written:
        while (path := os.path.dirname(path)) not in directories:
            directories.add(path)
    assert ("composite" in name or "database" in name) == (
        len(directories) > 1
    ) or name == "overwrite a composite by a tree"
    for directory in directories:
        named = [number for number, call in enumerate(before) if _names_in(call, directory)]
        synced = [number for number, call in enumerate(before) if call.name == "fsync" and call.paths == [directory]]
        assert synced and synced[-1] > named[-1], f"the names in {directory} changed after their last sync"
        assert len(synced) == 1, f"{directory} is synced {len(synced)} times"
    parent = os.path.dirname(location)
    assert "fsync" in [call.name for call in after if call.paths == [parent]], "the commit is not durable"
    if name.startswith("first"):
        tried = {call.paths[0] for call in calls if call.name == "rmdir"}  # directories that only test the file system
        for made in {call.paths[0] for call in calls if call.name == "mkdir"} - tried:
            above = os.path.dirname(made)
            assert "fsync" in [call.name for call in calls if call.paths == [above]], f"{made} is not durable"
    else:
        removed = [number for number, call in enumerate(after) if call.name in ("unlink", "unlinkat")]
        durable = [number for number, call in enumerate(after) if call.name == "fsync" and call.paths == [parent]]
        assert removed and durable[0] < removed[0], "the old checkpoint goes before the new one is durable"


def test_objects_next_to_other_files_are_durable_before_the_root(warm: Saver, tmp_path: Path) -> None:
    calls, location = _traced("overwrite beside other files", warm, tmp_path)
    moved, committed = [
        [number for number, call in enumerate(calls) if "rename" in call.name and call.paths[-1].endswith(end)][-1]
        for end in (".distcp", f"{location}/checkpoint.json")
    ]
    synced = [number for number, call in enumerate(calls) if call.name == "fsync" and call.paths == [location]]
    assert [number for number in synced if moved < number < committed], "the root is replaced before its objects"
    removed = [number for number, call in enumerate(calls) if number > committed and "unlink" in call.name]
    assert [number for number in synced if committed < number < removed[0]], "the old objects go before the new root"
    for path in {call.paths[0] for call in calls[:moved] if call.name in ("write", "pwrite64", "fallocate")}:
        touched = [call.name for call in calls[:moved] if path in call.paths and "rename" not in call.name]
        assert touched[-1] == "fdatasync", f"{path} was changed after its last sync"


def _names_in(call: Call, directory: str) -> bool:
    """Return True if a call changes names in a directory."""
    changes = call.name in ("openat", "mkdir", "rename", "renameat2", "unlink", "unlinkat", "rmdir")
    return changes and any(os.path.dirname(path) == directory for path in call.paths)
