"""Checkpointables of other software that are single files: loading, verification and conversion by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, CompositeCheckpointError
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import InspectedComposite, LayoutFactory, MemberKind, ReadStore
from tests.composites.foreign_format import ShelfLayout

LIST = "LIST"


class _ListLayout(ShelfLayout):
    """A layout for a file that lists the names of trees. Other layouts read the trees."""

    name = "list"

    def inspect(self, store: ReadStore, entry: str | None) -> None:
        return None

    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        if LIST not in store.list_names():
            return None
        members: dict[str, MemberKind] = dict.fromkeys(store.get(LIST).decode().split(), "tree")
        return InspectedComposite(members, "a list")


class _Plugin:
    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        return {"list": _ListLayout}


@pytest.fixture
def context() -> ckptcore.Context:
    return ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=(_Plugin(),)))


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Create a checkpoint that lists a file, a directory, and a missing file."""
    directory = tmp_path / "step_7"
    (directory / "inner").mkdir(parents=True)
    for name, value in (("weights.safetensors", 1.0), ("inner/model.safetensors", 2.0)):
        safetensors.numpy.save_file({"w": np.full(3, value)}, directory / name)
    (directory / LIST).write_text("weights.safetensors inner gone.safetensors")
    return directory


def test_a_file_loads_by_its_name(listed: Path, context: ckptcore.Context) -> None:
    with pytest.raises(CompositeCheckpointError, match=r"weights.safetensors, inner, gone.safetensors"):
        ckptcore.load(listed, context=_with_a_second_file(listed, context))
    loaded = ckptcore.load_checkpointables(listed, ["weights.safetensors", "inner"], context=context)
    assert loaded["weights.safetensors"]["w"].tolist() == [1, 1, 1]
    assert loaded["inner"]["w"].tolist() == [2, 2, 2]


def _with_a_second_file(listed: Path, context: ckptcore.Context) -> ckptcore.Context:
    """Add a second safetensors file. A plain load would accept the only safetensors file of a directory."""
    safetensors.numpy.save_file({"w": np.zeros(1)}, listed / "other.safetensors")
    return context


def test_a_missing_file_is_an_error(listed: Path, context: ckptcore.Context) -> None:
    assert set(ckptcore.load_checkpointables(listed, context=context)) == {"weights.safetensors", "inner"}
    with pytest.raises(CheckpointNotFoundError, match=r"'gone.safetensors' was saved and deleted later"):
        ckptcore.load_checkpointables(listed, ["gone.safetensors"], context=context)
    metadata = ckptcore.metadata(listed, context=context)
    assert list(metadata.checkpointables) == ["weights.safetensors", "inner"] and metadata.checkpointables.deleted == (
        "gone.safetensors",
    )


def test_a_file_is_verified_and_converted(listed: Path, tmp_path: Path, context: ckptcore.Context) -> None:
    (listed / LIST).write_text("weights.safetensors inner")
    assert not ckptcore.verify(listed, context=context).problems
    ckptcore.copy(listed, tmp_path / "ours", layout="safetensors", context=context)
    ours = ckptcore.load_checkpointables(tmp_path / "ours")
    assert {name: value["w"].tolist() for name, value in ours.items()} == {
        "weights.safetensors": [1, 1, 1], "inner": [2, 2, 2],
    }  # fmt: skip


def test_other_files_next_to_our_members_are_ignored(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}})
    for path in (tmp_path / "c" / "b").iterdir():
        path.unlink()
    (tmp_path / "c" / "b").rmdir()
    (tmp_path / "c" / "b").write_bytes(b"a file that came from elsewhere")
    assert list(ckptcore.load_checkpointables(tmp_path / "c")) == ["a"]
