"""States of a location, and a location that changes from one state to another in one step."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from ckptcore_testing.locations import objects_at, store_at

import ckptcore
from ckptcore.builtin.local_calls import exchange
from ckptcore.commit.names import name_of_partial, name_of_save
from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, Claim
from ckptcore.commit.root_json import encode_claim

LAYOUTS: Final = ("safetensors", "dcp", "ocdbt", "zarr3", "zarr")
"""Every layout that saves."""

SCHEMES: Final = ("file", "memory")

Objects = Mapping[str, bytes]
"""Objects of a directory by key."""

_NAME: Final = "3"
"""Name of the location in its directory. It is the name of a step."""

_numbers = itertools.count()


def tree_of(version: int) -> dict[str, object]:
    """Return a tree that differs when it is read as a foreign checkpoint. Every leaf has the version."""
    return {"version": version, "a": {"w": np.full(3, version), "empty": {}}, "b": (np.full(2, version), "text")}


def save_tree(version: int, layout: str, location: str, **options: Any) -> None:
    """Save `tree_of` a version."""
    ckptcore.save(location, tree_of(version), layout=layout, metadata={"version": version}, **options)


def save_composite(version: int, layout: str, location: str, **options: Any) -> None:
    """Save several trees of a version."""
    members = {"a": {"w": np.full(3, version)}, "other": tree_of(version)}
    ckptcore.save_checkpointables(location, members, layout=layout, metadata={"version": version}, **options)


def save_update(version: int, layout: str, location: str, *, base: str, **options: Any) -> None:
    """Save an update of the tree of a version. Its base has the same version."""
    ckptcore.save(
        location, {"b": (np.full(2, version + 1), "text")}, strategy=ckptcore.Update(base), layout=layout, **options
    )


def _save_with_base(version: int, layout: str, location: str) -> None:
    base = f"{location.rpartition('/')[0]}/base"
    save_tree(version, layout, base)
    save_update(version, layout, location, base=base)


def _save_partial(version: int, layout: str, location: str) -> None:
    ckptcore.partial(location, layout=layout).save(tree_of(version))


def _nothing(version: int, layout: str, location: str) -> None:
    """Write nothing."""


_WRITERS: Final[Mapping[str, tuple[int, Callable[..., None]]]] = {
    "nothing": (0, _nothing),
    "tree": (1, save_tree),
    "other tree": (2, save_tree),
    "several": (3, save_composite),
    "other several": (4, save_composite),
    "update": (5, _save_with_base),
    "partial": (7, _save_partial),
    "claim": (8, save_tree),
    "claim of several": (9, save_composite),
    "foreign": (10, save_tree),
    "foreign several": (11, save_composite),
}

STATES: Final = tuple(_WRITERS)
"""The states of a location."""


@functools.cache
def state_of(name: str, layout: str, scheme: str, version: int | None = None) -> Objects:
    """Return the objects of the parent directory of a location in a state. Equal arguments give the same save.

    Without `version`, each state has its own version.

    A claim has all objects of a save that was not committed. For readers, its root is the claim of another save.
    On storages with renames, it is in a hidden directory.
    """
    usual, write = _WRITERS[name]
    version = usual if version is None else version
    directory = f"memory://states-{next(_numbers)}/run"
    write(version, layout, f"{directory}/{_NAME}")
    objects = objects_at(directory)
    if name.startswith("foreign"):
        objects = {key: data for key, data in objects.items() if not key.rpartition("/")[2].startswith("checkpoint.")}
    if name.startswith("claim"):
        if scheme == "file":
            return {f"{name_of_save(_NAME, '0' * 16)}/{key.partition('/')[2]}": data for key, data in objects.items()}
        objects[f"{_NAME}/{ROOT_KEY}"] = _claim()
    if name == "partial" and scheme == "file":
        root = objects.pop(f"{_NAME}/{ROOT_KEY}")
        inside = {f"{name_of_partial(_NAME)}/{key.partition('/')[2]}": data for key, data in objects.items()}
        return {**inside, f"{name_of_partial(_NAME)}/{PARTIAL_KEY}": root}
    return objects


def _claim() -> bytes:
    return encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00"))


class Place:
    """A location whose state changes atomically between two operations of a reader."""

    def __init__(self, scheme: str, directory: Path, state: Objects) -> None:
        """Create a location in a state, in a separate directory."""
        name = f"place-{next(_numbers)}"
        self._above = directory / name / "run" if scheme == "file" else None
        around = f"file://{self._above}" if scheme == "file" else f"memory://{name}/run"
        self.location = f"{around}/{_NAME}"
        self._around = around
        if self._above is not None:
            self._above.mkdir(parents=True)
        self.become(state)

    def become(self, state: Objects) -> None:
        """Change to another state."""
        if self._above is None:
            store = store_at(self._around)
            store.delete([key for key in store.list() if key not in state])
            for key, data in state.items():
                store.put(key, data)
            return
        new = self._above.with_name(f"new-{next(_numbers)}")
        new.mkdir()
        for key, data in state.items():
            path = new / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        names = {key.partition("/")[0] for key in state}
        for name in {*names, *os.listdir(self._above)}:
            source, destination = str(new / name), str(self._above / name)
            if name in names and os.path.exists(destination):
                exchange(source, destination)
            elif name in names:
                os.rename(source, destination)
            else:
                os.rename(destination, source)
        shutil.rmtree(new)
