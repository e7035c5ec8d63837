"""Forged roots of composites and of their members, with correct checksums: no crash, and bounded work."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.hostile_json import sealed, tampered
from ckptcore_testing.locations import faulty_context, through

import ckptcore
from ckptcore.errors import CheckpointError, UnsupportedVersionError
from tests.composites.objects import Counter, Files, Linear
from tests.corruption.checkpoints import FAST, bounded_memory

_MEMORY_BYTES: Final = 32 << 20
_OPERATIONS: Final = 300
"""Limit of the storage operations of one function, for any of the small composites below."""


class _Forgery:
    """A composite whose roots a test can forge."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.location = directory / "step_1"
        objects = {"model": Linear(3), "data": Counter(2), "files": Files({"a/b": b"one", "c": b"two"})}
        ckptcore.save_checkpointables(self.location, objects, metadata={"loss": 0.5}, context=FAST)
        self.root = self.read("checkpoint.json")

    def read(self, key: str) -> dict[str, Any]:
        """Return the root with this key, without its checksum."""
        root: dict[str, Any] = json.loads((self.location / key).read_bytes())
        del root["checksum"]
        return root

    def forge(self, root: Any, key: str = "checkpoint.json") -> None:
        """Write a root with a correct checksum."""
        is_document = isinstance(root, dict) and root
        (self.location / key).write_bytes(sealed(root if is_document else {"forged": 0}))

    def with_members(self, members: Any) -> None:
        """Write the root with other members and a correct checksum."""
        root = copy.deepcopy(self.root)
        root["members"] = members
        self.forge(root)

    def attempts(self) -> Iterator[Callable[[ckptcore.Context, str], object]]:
        """Yield all functions that read a composite."""
        yield lambda context, location: ckptcore.load_checkpointables(location, context=context)
        yield lambda context, location: ckptcore.load_checkpointables(
            location, into={"model": Linear(0), "data": Counter(), "files": Files()}, context=context
        )
        yield lambda context, location: ckptcore.load_checkpointables(location, ["modle"], context=context)
        yield lambda context, location: ckptcore.load(location, context=context)
        yield lambda context, location: ckptcore.load(location + "/model", context=context)
        yield lambda context, location: ckptcore.metadata(location, context=context).nbytes
        yield lambda context, location: ckptcore.verify(location, context=context).ok
        yield lambda context, location: ckptcore.copy(
            location,
            f"memory://hostile/{self.directory.name}",
            layout="safetensors",
            overwrite="non-atomic",
            context=context,
        )

    def assert_harmless(self) -> None:
        """Fail if a function raises another error than CheckpointError, or takes much memory or many operations."""
        location = f"file://{self.location}"
        for attempt in self.attempts():
            plan = FaultPlan()
            context = faulty_context(location, plan)
            tracemalloc.start(1)
            try:
                with bounded_memory(self.location), contextlib.suppress(CheckpointError):
                    attempt(context, through(location))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < _MEMORY_BYTES, f"{peak} bytes of memory were taken"
            assert len(plan.operations) < _OPERATIONS, f"{len(plan.operations)} operations, as {plan.operations[-1]}"
        assert not (self.directory / "secret").exists() or (self.directory / "secret").read_bytes() == b"secret"

    def assert_refused(self) -> None:
        """Fail if anything can be loaded."""
        self.assert_harmless()
        with pytest.raises(CheckpointError):
            ckptcore.load_checkpointables(self.location)


@pytest.fixture
def forgery(tmp_path: Path) -> _Forgery:
    """Return a composite whose roots can be forged."""
    (tmp_path / "secret").write_bytes(b"secret")
    return _Forgery(tmp_path)


def test_a_valid_forgery_is_accepted(forgery: _Forgery) -> None:
    """Show that the tests below are not refused because of a wrong checksum."""
    for key in ("checkpoint.json", "model/checkpoint.json", "files/checkpoint.json"):
        forgery.forge(forgery.read(key), key)
    assert ckptcore.load_checkpointables(forgery.location)["files"] == {"a/b": b"one", "c": b"two"}
    assert ckptcore.verify(forgery.location).ok
    forgery.assert_harmless()


def _tamper(forgery: _Forgery, key: str, count: int) -> None:
    original = forgery.read(key)
    for root in tampered(original, count):
        forgery.forge(root, key)
        try:
            forgery.assert_harmless()
        except BaseException as error:
            error.add_note(f"the root was {json.dumps(root)[:3000]}")
            raise
    forgery.forge(original, key)
    assert ckptcore.verify(forgery.location).ok


@pytest.mark.parametrize("key", ["checkpoint.json", "files/checkpoint.json", "model/checkpoint.json"])
def test_tampered_roots_are_refused(key: str, forgery: _Forgery) -> None:
    _tamper(forgery, key, 12)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["checkpoint.json", "files/checkpoint.json", "model/checkpoint.json"])
def test_many_tampered_roots_are_refused(key: str, full: bool, forgery: _Forgery) -> None:
    _tamper(forgery, key, 600 if full else 300)


_NAMES: Final = (
    "", ".", "..", "../step_1/model", "/etc", "a/b", "model/../model", ".hidden", "checkpoint.json", "data.rank_0",
    "a\0b",
    "\ud800", "x" * 5000, "model/", "ä" * 150,
)  # fmt: skip


@pytest.mark.parametrize("name", _NAMES, ids=lambda name: repr(name)[:30])
def test_impossible_names_are_refused(name: str, forgery: _Forgery) -> None:
    for kind in ("tree", "files"):
        forgery.with_members({name: [kind, None], "model": ["tree", None]})
        forgery.assert_refused()


@pytest.mark.parametrize(
    "members",
    [None, [], {}, 3, "model", ["model"], {"model": None}, {"model": "tree"}, {"model": ["tree"]}, {"model": [[], {}]},
                {"model": {"kind": "tree"}}, {"model": ["tree", None, 1]}]
)  # fmt: skip
def test_malformed_members_are_refused(members: Any, forgery: _Forgery) -> None:
    forgery.with_members(members)
    if members == {}:
        forgery.assert_harmless()
        assert ckptcore.load_checkpointables(forgery.location) == {}
    else:
        forgery.assert_refused()


@pytest.mark.parametrize("processes", [0, -1, (1 << 24) + 1, 1 << 70, 1.0, True, "2", [2]])
def test_impossible_numbers_of_processes_are_refused(processes: Any, forgery: _Forgery) -> None:
    forgery.with_members({"model": ["tree", None], "data": ["tree", processes]})
    forgery.assert_refused()


def test_a_huge_number_of_processes_needs_little_work(forgery: _Forgery) -> None:
    """No loop runs over the stated number of processes, whether or not some of them left files."""
    members = {f"m{number}": ["tree", 1 << 24] for number in range(50)}
    forgery.with_members({**members, "model": ["tree", None]})
    forgery.assert_harmless()
    assert list(ckptcore.load_checkpointables(forgery.location)) == ["model"]
    for rank in (0, 7, (1 << 24) - 1, 1 << 24):
        (forgery.location / f"m3.rank_{rank}").mkdir()
        (forgery.location / f"m3.rank_{rank}" / "a").write_bytes(b"")
    for odd in ("m4.rank_00", "m4.rank_-1", "m4.rank_١", "m4.rank_" + "9" * 100, "m4.rank_"):
        (forgery.location / odd).mkdir()
    forgery.assert_harmless()
    problems = ckptcore.verify(forgery.location).problems
    assert 0 < len(problems) < 10
    with pytest.raises(CheckpointError, match="16777216"):
        ckptcore.load_checkpointables(forgery.location, ["m3"])


def test_overwriting_a_checkpoint_with_a_huge_number_of_processes_needs_little_work(forgery: _Forgery) -> None:
    """The overwrite lists the files of members and does not count to the number. It keeps files that no root names."""
    for name in ("model", "data", "files"):
        shutil.rmtree(forgery.location / name)
    forgery.with_members({f"m{number}": ["tree", 1 << 24] for number in range(50)})
    for name in ("m3.rank_7", "m3.rank_007", f"m3.rank_{1 << 24}", "m3", "other"):
        (forgery.location / name).mkdir()
        (forgery.location / name / "a").write_bytes(b"")
    (forgery.location / "m3.rank_7" / "checkpoint.json").write_bytes(b"{}")
    tracemalloc.start(1)
    try:
        ckptcore.save(forgery.location, {"a": 1}, overwrite="keep-other-files", context=FAST)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < _MEMORY_BYTES
    names = {str(path.relative_to(forgery.location)) for path in forgery.location.glob("*/*")}
    assert names == {"m3.rank_7/a", "m3.rank_007/a", f"m3.rank_{1 << 24}/a", "m3/a", "other/a"}


def test_very_many_members_need_little_work(forgery: _Forgery) -> None:
    forgery.with_members({**{f"name {number}": ["tree", None] for number in range(10_000)}, "model": ["tree", None]})
    forgery.assert_harmless()
    assert list(ckptcore.load_checkpointables(forgery.location)) == ["model"]
    with pytest.raises(CheckpointError) as caught:
        ckptcore.load_checkpointables(forgery.location, ["modle"])
    assert len(str(caught.value)) < 2000


def test_unknown_kinds_are_refused(forgery: _Forgery) -> None:
    forgery.with_members({"model": ["tensors", None]})
    forgery.assert_harmless()
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        ckptcore.load_checkpointables(forgery.location)


def test_mixed_kinds_are_refused(forgery: _Forgery) -> None:
    forgery.with_members({"model": ["files", None], "files": ["tree", None], "data": ["tree", 1]})
    forgery.assert_refused()
    with pytest.raises(CheckpointError):
        ckptcore.load_checkpointables(forgery.location, into={"model": Files()})
    for name, like in (("files", {"a": 1}), ("model", None), ("files", None)):
        with pytest.raises(CheckpointError):
            ckptcore.load_checkpointables(forgery.location, {name: like})


@pytest.mark.parametrize("target", [".", "..", "model", "files/a"])
def test_linked_members_are_refused(target: str, forgery: _Forgery) -> None:
    """One of the targets is the composite itself, which would be its own member."""
    (forgery.location / "loop").symlink_to(target)
    forgery.with_members({"loop": ["tree", None], "model": ["tree", None]})
    forgery.assert_harmless()
    root = forgery.read("checkpoint.json")
    root["role"] = "member"
    forgery.forge(root)
    forgery.assert_harmless()


def test_a_root_of_a_tree_and_a_composite_is_refused(forgery: _Forgery) -> None:
    tree = forgery.read("model/checkpoint.json")
    forgery.forge({**tree, "members": forgery.root["members"]})
    forgery.assert_harmless()
    forgery.forge({**tree, "members": {}}, "model/checkpoint.json")
    forgery.assert_refused()


_KEYS: Final = ("../../../secret", "/etc/passwd", "..", "", "a/../../../secret", "c/", "x" * 5000, "a\0b", "\ud800")


@pytest.mark.parametrize("key", _KEYS, ids=lambda key: repr(key)[:30])
def test_files_outside_of_the_checkpoint_are_refused(key: str, forgery: _Forgery) -> None:
    root = forgery.read("files/checkpoint.json")
    root["tables"]["objects"]["key"] = [key, "c"]
    forgery.forge(root, "files/checkpoint.json")
    forgery.assert_refused()
    target = Files({"as it": b"was"})
    with pytest.raises(CheckpointError):
        ckptcore.load_checkpointables(forgery.location, into={"files": target})
    assert target.files == {"as it": b"was"}


@pytest.mark.parametrize("size", [1 << 20, 1 << 40, 1 << 60])
def test_a_false_large_file_size_allocates_no_memory(size: int, forgery: _Forgery) -> None:
    root = forgery.read("files/checkpoint.json")
    root["tables"]["objects"].update(size=[size, 3], checksums=["", root["tables"]["objects"]["checksums"][1]])
    forgery.forge(root, "files/checkpoint.json")
    forgery.assert_refused()
    assert not ckptcore.verify(forgery.location).ok


def test_conflicting_file_names_are_refused(forgery: _Forgery) -> None:
    """A file and a directory with the same name, which only a storage without directories can contain."""
    location = f"memory://hostile-files-{os.getpid()}/c"
    ckptcore.save_checkpointables(location, {"files": Files({"a/b": b"one", "c": b"two"})})
    from ckptcore.plugins import installed_plugins
    from ckptcore.protocols import StorageOptions

    store = installed_plugins().storage("memory")(location, StorageOptions())
    root = json.loads(store.get("files/checkpoint.json"))
    root["tables"]["objects"]["key"] = ["a/b", "a"]
    store.put("files/checkpoint.json", sealed(root))
    store.put("files/a", b"two")
    target = Files({"as it": b"was"})
    with pytest.raises(CheckpointError, match="or also as a directory"):
        ckptcore.load_checkpointables(location, into={"files": target})
    assert target.files == {"as it": b"was"}


@pytest.mark.parametrize("value", [10**400, [], {}, "1", None, True, "nan", 1e308])
@pytest.mark.parametrize("field", ["metrics", "progress", "timeline"])
def test_odd_values_of_optional_fields_are_harmless(field: str, value: Any, forgery: _Forgery) -> None:
    root = copy.deepcopy(forgery.root)
    for forged in ({"step": value}, value, {"": value}, {"operation": "save", "phase": value}):
        root[field] = forged
        forgery.forge(root)
        forgery.assert_harmless()


def test_arrays_of_members_cannot_exceed_their_files(forgery: _Forgery) -> None:
    root = forgery.read("model/checkpoint.json")
    root["tables"]["tree"]["shape"][0] = [1 << 50]
    forgery.forge(root, "model/checkpoint.json")
    forgery.assert_refused()
    assert ckptcore.load_checkpointables(forgery.location, ["data"])["data"]["position"] == 2
