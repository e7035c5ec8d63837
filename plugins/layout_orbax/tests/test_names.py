"""Names of arrays. They equal the names that Orbax uses, unless these are ambiguous or invalid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ckptcore_orbax.zarr.stored_arrays import directory_names, key_names

import ckptcore


def names_of(paths: list[tuple[str | int, ...]]) -> list[str]:
    return list(directory_names(dict(enumerate(paths))).values())


def test_keys_are_joined_by_dots() -> None:
    paths = {0: ("layers", 0, "w"), 1: ("b",)}
    assert key_names(paths) == {0: "layers.0.w", 1: "b"}


@pytest.mark.parametrize("name", ["c", "d", "w", "zarr", "layer norm", "größe", "a/b"])
def test_valid_names_of_directories_are_kept(name: str) -> None:
    assert names_of([(name,), ("other",)]) == [name, "other"]


@pytest.mark.parametrize(
    "name", ["..", ".", "_METADATA", "manifest.ocdbt", "checkpoint.json", "ocdbt.process_0", "a//b", "/a", "x" * 201]
)
def test_invalid_names_of_directories_are_escaped(name: str) -> None:
    escaped, other = names_of([(name,), ("other",)])
    assert other == "other"
    assert escaped.startswith("%") and "/" not in escaped and len(escaped.encode()) <= 202


def test_a_name_inside_the_directory_of_another_array_is_escaped() -> None:
    assert names_of([("a",), ("a/c",)]) == ["a", "%a%2Fc"]


def test_ambiguous_names_are_escaped() -> None:
    names = names_of([("a.b",), ("a", "b"), ("c",)])
    assert len(set(names)) == 3 and "a.b" not in names and names[2] == "c"


@pytest.mark.parametrize("layout", ["zarr", "zarr3", "ocdbt"])
def test_orbax_loads_arrays_with_usual_names(layout: str, tmp_path: Path) -> None:
    v1 = pytest.importorskip("orbax.checkpoint").v1
    state = {name: np.full(3, number) for number, name in enumerate(["c", "d", "a/b", "0", "layer norm", "größe"])}
    ckptcore.save(tmp_path / "checkpoint", state, layout=layout)
    loaded = v1.load(tmp_path / "checkpoint", state)
    assert {name: array.tolist() for name, array in loaded.items()} == {
        name: array.tolist() for name, array in state.items()
    }
