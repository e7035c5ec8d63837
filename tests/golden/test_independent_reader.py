"""The independent reader reads checkpoints, and golden checkpoints still load."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, run_ranks

import ckptcore
from ckptcore.protocols import Coordinator
from tests.golden.independent_reader import Leaf, NotCommitted, read_checkpoint, read_composite
from tests.golden.states import GOLDEN_PROCESSES, GoldenFiles, golden_composite, golden_files, golden_state, large_state

CHECKPOINTS = Path(__file__).parent / "checkpoints"


def assert_same_tree(stored: Any, original: Any, path: str = "") -> None:
    """Compare a tree of the reader, which has a `Leaf` for each leaf, with the saved one."""
    if isinstance(original, dict):
        assert type(stored) is (OrderedDict if isinstance(original, OrderedDict) else dict), path
        assert list(stored) == list(original), path
        for key, child in original.items():
            assert_same_tree(stored[key], child, f"{path}/{key}")
    elif hasattr(original, "_fields"):
        assert_same_tree(stored, {f".{name}": value for name, value in original._asdict().items()}, path)
    elif dataclasses.is_dataclass(original) and not isinstance(original, type):
        names = [field.name for field in dataclasses.fields(original)]
        assert_same_tree(stored, {f".{name}": getattr(original, name) for name in names}, path)
    elif isinstance(original, list | tuple):
        assert type(stored) is type(original), path
        assert len(stored) == len(original), path
        for number, child in enumerate(original):
            assert_same_tree(stored[number], child, f"{path}/{number}")
    else:
        assert isinstance(stored, Leaf), path
        assert_same_leaf(stored.content, original, path)


def assert_same_leaf(content: Any, original: Any, path: str) -> None:
    """Compare the content of a leaf, bit for bit, and its type."""
    if isinstance(original, np.ndarray | np.generic):
        expected = np.asarray(original)
        assert content.dtype == expected.dtype, path
        assert content.shape == expected.shape, path
        assert content.tobytes() == expected.tobytes(), path
    else:
        assert type(content) is type(original), path
        assert repr(content) == repr(original), path


def assert_same_value(loaded: Any, original: Any, path: str = "") -> None:
    """Compare a tree that ckptcore loaded without an abstract tree with the saved one."""
    if hasattr(original, "_fields"):
        original = original._asdict()
    elif dataclasses.is_dataclass(original) and not isinstance(original, type):
        original = {field.name: getattr(original, field.name) for field in dataclasses.fields(original)}
    if isinstance(original, dict):
        assert list(loaded) == list(original), path
        for key, child in original.items():
            assert_same_value(loaded[key], child, f"{path}/{key}")
    elif isinstance(original, list | tuple):
        assert type(loaded) is type(original), path
        assert len(loaded) == len(original), path
        for number, child in enumerate(original):
            assert_same_value(loaded[number], child, f"{path}/{number}")
    else:
        assert_same_leaf(loaded, original, path)


def test_the_reader_reads_every_kind_of_leaf_and_container(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "golden", golden_state(), metadata={"note": "ä", "numbers": [1, 2.5, None]})
    tree, custom = read_checkpoint(tmp_path / "golden")
    assert_same_tree(tree, golden_state())
    assert custom == {"note": "ä", "numbers": [1, 2.5, None]}


def test_the_reader_reads_several_files(tmp_path: Path) -> None:
    layout = ckptcore.SafetensorsLayout(max_file_bytes=1000)
    ckptcore.save(tmp_path / "golden", golden_state(), layout=layout)
    assert len(list((tmp_path / "golden").glob("*.safetensors"))) > 1
    tree, _ = read_checkpoint(tmp_path / "golden")
    assert_same_tree(tree, golden_state())


def test_the_reader_reads_tables_in_separate_objects(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "large", large_state())
    assert list((tmp_path / "large").glob("checkpoint.*.tree.json"))
    tree, _ = read_checkpoint(tmp_path / "large")
    assert_same_tree(tree, large_state())


def test_the_reader_reads_columns(tmp_path: Path) -> None:
    state = {
        "ints": [number * 1000 - 300_000 for number in range(1000)],
        "mixed": (1, -2.5, None, True, "text", "\ud800", 1 << 80, float("inf")) * 1000,
        "flags": [True, False] * 500,
        "dict": {number: str(number) for number in range(1000)},
        "rows": [7, *[(number, [number / 3]) for number in range(1000)], []],
    }
    ckptcore.save(tmp_path / "columns", state)
    tree, _ = read_checkpoint(tmp_path / "columns")
    assert repr({name: leaf.content for name, leaf in tree.items()}) == repr(state)


def test_the_reader_reads_one_leaf(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "leaf", np.arange(3))
    tree, _ = read_checkpoint(tmp_path / "leaf")
    assert_same_tree(tree, np.arange(3))


def test_the_reader_refuses_a_claim(tmp_path: Path) -> None:
    from ckptcore.commit.root import Claim
    from ckptcore.commit.root_json import encode_claim

    (tmp_path / "checkpoint.json").write_bytes(encode_claim(Claim("0123456789abcdef", "2024-01-01T00:00:00+00:00")))
    with pytest.raises(NotCommitted):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("position", [0, 40, 200, -60, -20, -2])
def test_the_reader_refuses_a_damaged_root(tmp_path: Path, position: int) -> None:
    ckptcore.save(tmp_path / "damaged", golden_state())
    root = tmp_path / "damaged" / "checkpoint.json"
    data = bytearray(root.read_bytes())
    data[position] ^= 1
    root.write_bytes(data)
    with pytest.raises(ValueError, match="checksum|damaged"):
        read_checkpoint(tmp_path / "damaged")


TREES = [CHECKPOINTS / name for name in ("tree", "several-files", "composite/state", "update")]
COMPOSITES = [CHECKPOINTS / "composite"]


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(CHECKPOINTS)))
def test_golden_trees_load(path: Path) -> None:
    assert_same_value(ckptcore.load(path), golden_state())
    assert ckptcore.verify(path).ok
    custom = {} if path.name == "state" else {"made for": "tests/golden"}
    assert ckptcore.metadata(path).custom == custom
    tree, metadata = read_checkpoint(path)
    assert_same_tree(tree, golden_state())
    assert metadata == custom


@pytest.mark.parametrize("path", COMPOSITES, ids=lambda path: str(path.relative_to(CHECKPOINTS)))
def test_golden_composites_load(path: Path) -> None:
    assert ckptcore.verify(path).ok
    metadata = ckptcore.metadata(path)
    assert metadata.custom == {"made for": "tests/golden"}
    assert metadata.checkpointables.processes == {"data": GOLDEN_PROCESSES, "files": GOLDEN_PROCESSES}

    def load(coordinator: Coordinator) -> None:
        loaded = ckptcore.load_checkpointables(
            path, context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        )
        rank = coordinator.rank
        assert list(loaded) == list(golden_composite(rank))
        assert_same_value(loaded["state"], golden_state())
        assert_same_value(loaded["data"], {"rank": rank, "position": np.arange(rank, rank + 4)})
        assert loaded["files"] == golden_files(rank) and loaded["a name"] == {}
        into = {"files": GoldenFiles(rank)}
        ckptcore.load_checkpointables(
            path, into=into, context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        )

    ThreadJob(GOLDEN_PROCESSES).run(load)
    assert_golden_composite(path)


def assert_golden_composite(path: Path) -> None:
    """Read a golden composite with the independent reader, and compare it."""
    contents, custom = read_composite(path)
    assert custom == {"made for": "tests/golden"}
    assert list(contents) == list(golden_composite(0))
    assert_same_tree(contents["state"], golden_state())
    assert contents["files"] == [golden_files(rank) for rank in range(GOLDEN_PROCESSES)]
    assert contents["a name"] == {}
    for rank in range(GOLDEN_PROCESSES):
        assert_same_tree(contents["data"][rank], {"rank": rank, "position": np.arange(rank, rank + 4)})


def test_the_reader_reads_a_composite(tmp_path: Path) -> None:
    def save(rank: int, context: ckptcore.Context) -> None:
        ckptcore.save_checkpointables(
            tmp_path / "c", golden_composite(rank), metadata={"made for": "tests/golden"},
            context=context,
        )  # fmt: skip

    run_ranks(GOLDEN_PROCESSES, save)
    assert_golden_composite(tmp_path / "c")
    for rank in range(GOLDEN_PROCESSES):
        ckptcore.delete(tmp_path / "c" / f"files.rank_{rank}")
    contents, _ = read_composite(tmp_path / "c")
    assert list(contents) == ["state", "data", "a name"]
    shutil.copytree(tmp_path / "c" / "state", tmp_path / "alone")
    assert_same_tree(read_checkpoint(tmp_path / "alone")[0], golden_state())


def test_the_reader_refuses_members_of_another_save(tmp_path: Path) -> None:
    for name in ("one", "two"):
        ckptcore.save_checkpointables(tmp_path / name, {"state": {"a": 1}})
    shutil.rmtree(tmp_path / "two" / "state")
    shutil.copytree(tmp_path / "one" / "state", tmp_path / "two" / "state")
    with pytest.raises(ValueError, match="replaced"):
        read_composite(tmp_path / "two")
    with pytest.raises(NotCommitted):
        read_checkpoint(tmp_path / "two" / "state")
    (tmp_path / "one").rename(tmp_path / ".one.0123456789abcdef.ckptcore")
    with pytest.raises(NotCommitted):
        read_checkpoint(tmp_path / ".one.0123456789abcdef.ckptcore" / "state")


def test_the_reader_reads_the_state_of_one_process(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", golden_composite(0))
    contents, _ = read_composite(tmp_path / "c")
    assert contents["files"] == [golden_files(0)] and len(contents["data"]) == 1


def test_differences_are_detected() -> None:
    """Show that the comparisons above can fail."""
    leaf = Leaf("float", math.nan)
    assert_same_tree({"x": leaf}, {"x": math.nan})
    for other in ({"x": 0.0}, {"y": math.nan}, {"x": [math.nan]}, [math.nan], {"x": np.float64(math.nan)}):
        with pytest.raises((AssertionError, AttributeError)):
            assert_same_tree({"x": leaf}, other)
