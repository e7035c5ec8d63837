"""Hostile roots with a valid checksum: a load must not crash, hang or use much memory."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import xxhash
from ckptcore_orbax import OcdbtLayout, Zarr3Layout
from ckptcore_testing.hostile_json import sealed, tampered

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError, InvalidLocationError
from tests.corruption.checkpoints import FAST, RELAXED, bounded_memory

_MEMORY_BYTES: Final = 32 << 20
"""More than any of the small roots below may make a load allocate, in bytes."""


class _Forgery:
    """A checkpoint whose root a test can forge."""

    def __init__(self, directory: Path) -> None:
        self.location = directory / "step_1"
        self.state = {
            "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
            "bias": np.arange(5, dtype=np.int64),
            "layers": [np.ones(3, np.uint8), ("text", 3, 2.5, None, 1j, b"bytes", True)],
            "long": "x" * 9000,
        }
        tied = self.state["weight"]
        ckptcore.save(self.location, self.state | {"tied": tied}, metadata={"loss": 0.5}, context=FAST)
        self.root: dict[str, Any] = json.loads((self.location / "checkpoint.json").read_bytes())
        del self.root["checksum"]

    def forge(self, root: Any) -> None:
        """Write a root with a correct checksum."""
        is_document = isinstance(root, dict) and root
        self._write(sealed(root if is_document else {"forged": 0}))

    def _write(self, content: bytes) -> None:
        (self.location / "checkpoint.json").write_bytes(content)

    def forge_text(self, text: str) -> None:
        """Write the text of a root, which lacks its last brace, with a correct checksum."""
        self._write(sealed(text.encode() + b"}"))

    def changed(self, **tables: Any) -> dict[str, Any]:
        """Return the root with some values replaced. A keyword is the path of a value, with ``__`` between keys."""
        root = copy.deepcopy(self.root)
        for place, value in tables.items():
            *above, last = place.split("__")
            holder: Any = root
            for name in above:
                holder = holder[int(name) if isinstance(holder, list) else name]
            holder[int(last) if isinstance(holder, list) else last] = value
        return root

    def attempts(self) -> Iterator[Callable[[], object]]:
        """Yield all functions that read a root."""
        location = self.location
        yield lambda: ckptcore.load(location, context=FAST)
        yield lambda: ckptcore.load(location, context=RELAXED)
        yield lambda: ckptcore.load(location, {"weight": self.state["weight"], "bias": ...}, context=FAST)
        yield lambda: ckptcore.load_into(location, copy.deepcopy(self.state), context=RELAXED)
        yield lambda: ckptcore.metadata(location).nbytes
        yield lambda: ckptcore.verify(location).ok

    def assert_harmless(self) -> None:
        """Fail if a function raises another error than CheckpointError, or needs much memory."""
        for attempt in self.attempts():
            tracemalloc.start(1)
            try:
                with bounded_memory(self.location), contextlib.suppress(CheckpointError):
                    attempt()
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < _MEMORY_BYTES, f"{peak} bytes of memory were taken"

    def assert_refused(self, match: str | None = None) -> None:
        """Fail if the checkpoint can be loaded."""
        self.assert_harmless()
        with pytest.raises(CheckpointError, match=match):
            ckptcore.load(self.location)


def test_a_valid_forgery_is_accepted(tmp_path: Path) -> None:
    """Show that the tests below are not refused because of a wrong checksum."""
    forgery = _Forgery(tmp_path)
    forgery.forge(forgery.root)
    assert ckptcore.load(forgery.location)["bias"].tolist() == [0, 1, 2, 3, 4]
    assert ckptcore.verify(forgery.location).ok


def _tamper(directory: Path, count: int) -> None:
    forgery = _Forgery(directory)
    for root in tampered(forgery.root, count):
        forgery.forge(root)
        try:
            forgery.assert_harmless()
        except BaseException as error:
            error.add_note(f"the root was {json.dumps(root)[:3000]}")
            raise


def test_tampered_roots_are_refused(tmp_path: Path) -> None:
    _tamper(tmp_path, 150)


@pytest.mark.slow
def test_many_tampered_roots_are_refused(full: bool, tmp_path: Path) -> None:
    _tamper(tmp_path, 10_000 if full else 2_500)


_SHAPES: Final[dict[str, Any]] = {
    "a petabyte": [1 << 50],
    "more than memory has addresses for": [1 << 62, 1 << 62],
    "more than 64 bits": [1 << 70],
    "nothing of very much": [0, 1 << 62, 1 << 62],
    "nothing of more than 64 bits": [0, 1 << 70],
    "many axes": [1] * 65,
    "negative": [-1, -12],
    "no number": ["3", 4],
    "a truth": [True, 12],
    "a fraction": [3.0, 4],
    "no list": 12,
    "text": "34",
}


@pytest.mark.parametrize("name", _SHAPES)
def test_impossible_shapes_are_refused(name: str, tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    forgery.forge(forgery.changed(tables__tree__shape__1=_SHAPES[name]))
    forgery.assert_refused()
    assert not _is_sound(forgery.location)


def test_a_false_object_size_is_detected(tmp_path: Path) -> None:
    """The stated sizes agree with each other, but not with the file. There are no checksums to count."""
    forgery = _Forgery(tmp_path)
    root = forgery.changed(tables__tree__shape__1=[1 << 50], tables__objects__size=[1 << 60])
    root["tables"]["objects"]["checksums"] = [""]
    forgery.forge(root)
    forgery.assert_refused("model.safetensors")


def test_many_arrays_in_the_same_bytes_are_refused(tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    count, extent = 2000, 9000
    root = forgery.changed(
        tables__tree={
            "skeleton": ["list", None, count], "count": count, "dtypes": ["uint8"], "dtype": [0] * count,
            "shape": [[extent]] * count, "values": [], "extras": {}, "aliases": [],
        },
        tables__layout={"files": ["model.safetensors"], "leaf": list(range(count)), "file": [0] * count,
                        "offset": [100] * count},
    )  # fmt: skip
    forgery.forge(root)
    forgery.assert_refused("model.safetensors")


def test_a_tree_with_more_nodes_than_characters_is_refused(tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    count = 3000
    containers = [["list", None, count]] * count
    root = forgery.changed(
        tables__tree={
            "skeleton": ["list", None, containers], "count": count, "dtypes": [], "dtype": [], "shape": [],
            "values": [[number, "none", None] for number in range(count)], "extras": {}, "aliases": [],
        },
    )  # fmt: skip
    forgery.forge(root)
    forgery.assert_refused()


@pytest.mark.parametrize("depth", [2000, 200_000])
def test_a_deeply_nested_root_is_refused(depth: int, tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    nested = "[" * depth + "]" * depth
    encoded = json.dumps(forgery.root, separators=(",", ":"))
    for place in ("skeleton", "custom", "layout", "shape"):
        forgery.forge_text(encoded[:-1] + f',"tables":{{"{place}":{nested}}}')
        forgery.assert_refused()
    forgery.forge_text('{"format":' + nested)
    forgery.assert_refused()
    tree: Any = 0
    for _ in range(300):
        tree = ["dict", ["a"], [tree]]
    forgery.forge(forgery.changed(tables__tree__skeleton=tree))
    forgery.assert_refused()


_LAYOUTS: Final[dict[str, Any]] = {
    "safetensors": "safetensors",
    "dcp": "dcp",
    "zarr3": "zarr3",
    "compressed zarr3": Zarr3Layout(compression="zstd"),
    "zarr": "zarr",
    "ocdbt": "ocdbt",
    "compressed ocdbt": OcdbtLayout(compression="zstd"),
}


@pytest.mark.parametrize("shape", [[1 << 62, 10], [1 << 40, 4], [7, 10]], ids=str)
@pytest.mark.parametrize("name", _LAYOUTS)
def test_an_array_larger_than_its_stored_bytes_is_refused(name: str, shape: list[int], tmp_path: Path) -> None:
    """The load is refused before it reads or allocates anything. `verify` reports the array."""
    location = tmp_path / "c"
    ckptcore.save(location, {"w": np.zeros((6, 10), np.float32), "v": np.ones(3)}, layout=_LAYOUTS[name])
    forged = json.loads((location / "checkpoint.json").read_bytes())
    tree = forged["tables"]["tree"]
    tree["shape"][tree["shape"].index([6, 10])] = shape
    _describe(forged["tables"]["layout"], [6, 10], shape)
    (location / "checkpoint.json").write_bytes(sealed(forged))
    tracemalloc.start()
    try:
        for read in (
            ckptcore.load,
            lambda location: list(ckptcore.open(location).iter_boxes()),
            lambda location: ckptcore.copy(location, tmp_path / "copy", layout="safetensors"),
        ):
            with pytest.raises(CorruptCheckpointError):
                read(location)
        if name != "safetensors":  # a slice of a contiguous array reads only its own bytes
            with pytest.raises(CorruptCheckpointError):
                ckptcore.open(location)["w"][:1, :1]
        assert not _is_sound(location)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < _MEMORY_BYTES


def _describe(table: Any, before: list[int], after: list[int]) -> None:
    """Make the array documents in a layout's table agree with a shape."""
    for value in table.values() if isinstance(table, dict) else table if isinstance(table, list) else ():
        if isinstance(table, dict) and value == before and table.get("shape") == before:
            table["shape"] = after
        _describe(value, before, after)


def _is_sound(location: Path) -> bool:
    try:
        return ckptcore.verify(location).ok
    except CheckpointError:
        return False


_KEYS: Final = (
    "../../secret", "/etc/passwd", "..", ".", "", "a/../../secret", "./secret", "secret/", "//secret", "a\0b", "\ud800",
    "../other/model.safetensors", "x" * 5000, "checkpoint.json/x",
)  # fmt: skip


@pytest.mark.parametrize("key", _KEYS, ids=lambda key: repr(key)[:30])
def test_keys_outside_of_the_checkpoint_are_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret" * 2000)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"secret" * 2000)
    forgery = _Forgery(tmp_path)
    size = os.path.getsize(forgery.location / "model.safetensors")
    forgery.forge(forgery.changed(tables__objects__key=[key], tables__layout__files=[key]))
    forgery.assert_refused()
    forgery.forge(forgery.changed(tables__layout__files=[key]))
    forgery.assert_refused()
    root = forgery.changed(tables__objects__checksums=[""], tables__objects__key=[key], tables__layout__files=[key])
    root["tables"]["objects"]["size"] = [size]
    forgery.forge(root)
    forgery.assert_refused()
    checksum = "xxh3_64:" + xxhash.xxh3_64_hexdigest(b"secret" * 2000)
    root = forgery.changed(parts={"custom": {"key": key, "size": 12_000, "checksum": checksum}})
    forgery.forge(root)
    forgery.assert_refused()


@pytest.mark.parametrize("changes", [{"layout": ""}, {"layout": None}, {"kind": "files"}], ids=repr)
def test_a_root_of_neither_a_tree_nor_files_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    forgery.forge(forgery.changed(**changes))
    forgery.assert_refused()


def test_a_false_large_part_size_allocates_no_memory(tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    for size in (-1, 1 << 31, 1 << 40, 1 << 70, 1.5, "3", None):
        part = {"key": "model.safetensors", "size": size, "checksum": "xxh3_64:0000000000000000"}
        forgery.forge(forgery.changed(parts={"custom": part}))
        forgery.assert_refused()


@pytest.mark.parametrize(
    "offsets", [[-1] * 4, [1 << 62] * 4, [1 << 70] * 4, [0] * 4, [9000] * 4, [True] * 4, ["0"] * 4, [None] * 4]
)
def test_invalid_offsets_are_refused(offsets: list[Any], tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    count = len(forgery.root["tables"]["layout"]["offset"])
    forgery.forge(forgery.changed(tables__layout__offset=offsets[:1] * count))
    forgery.assert_harmless()
    if offsets != [0] * 4:
        forgery.assert_refused()


def test_columns_of_unequal_length_are_refused(tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    tree = forgery.root["tables"]["tree"]
    for changes in (
        {"tables__tree__count": 1 << 40},
        {"tables__tree__count": -1},
        {"tables__tree__dtype": tree["dtype"] * 1000},
        {"tables__tree__shape": tree["shape"][:-1]},
        {"tables__tree__dtype__0": 99},
        {"tables__tree__dtypes__0": "S999999999"},
        {"tables__tree__dtypes__0": "object"},
        {"tables__tree__aliases": [[0, 0]]},
        {"tables__tree__aliases": [[0, 1], [1, 0]]},
        {"tables__tree__aliases": [[1 << 40, 0]]},
        {"tables__tree__values__0__0": 1 << 40},
        {"tables__tree__skeleton": ["list", None, 1 << 40]},
        {"tables__tree__skeleton": ["dict", ["a", "a"], 2]},
        {"tables__objects__size": [1, 2, 3]},
        {"tables__objects__checksums": ["AAAA"]},
        {"tables__objects__algorithm": "md5"},
        {"tables__objects__block_bytes": 0},
        {"tables__layout__leaf": [1 << 40] * 4},
        {"layout": "no such layout"},
        {"layout": ["safetensors"]},
        {"version": 4},
        {"version": "1"},
        {"state": "claimed"},
        {"state": "else"},
        {"save_id": "../../x"},
        {"format": "other"},
    ):
        forgery.forge(forgery.changed(**changes))
        try:
            forgery.assert_refused()
        except BaseException as error:
            error.add_note(str(changes))
            raise


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    """Two readers might use different values of a duplicate key."""
    forgery = _Forgery(tmp_path)
    encoded = json.dumps(forgery.root, separators=(",", ":"))[:-1]
    forgery.forge_text(encoded + ',"layout":"no such layout"')
    forgery.assert_refused()


# --- special files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors"])
def test_links_out_of_the_checkpoint_are_refused(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    forgery = _Forgery(tmp_path / "runs")
    path = forgery.location / name
    path.rename(outside / name)
    path.symlink_to(outside / name)
    for attempt in forgery.attempts():
        with contextlib.suppress(CheckpointError):
            attempt()
    with pytest.raises((InvalidLocationError, CorruptCheckpointError), match="leads out"):
        ckptcore.load(forgery.location)


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["directory", "pipe", "loop", "dangling"])
def test_special_files_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    forgery = _Forgery(tmp_path)
    path = forgery.location / name
    path.unlink()
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case _:
            path.symlink_to(forgery.location / "nowhere")
    for attempt in forgery.attempts():
        with contextlib.suppress(CheckpointError):
            attempt()
    if name != "checkpoint.json":  # without a root, the directory may be a checkpoint of other software
        with pytest.raises(CheckpointError):
            ckptcore.load(forgery.location)
        assert not ckptcore.verify(forgery.location).ok
