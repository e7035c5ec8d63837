"""Programs that run in an environment of installed wheels: ``python -I alone.py NAME ARGUMENT...`` prints JSON.

The module imports nothing of the repository but `ckptcore`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptcore
from ckptcore.distributions import DISTRIBUTIONS
from ckptcore.errors import UnsupportedLeafError
from ckptcore.results import VerifyReport


def digest(value: object) -> str:
    """Return a hash of a loaded value: types, keys, dtypes, shapes and elements."""
    hasher = hashlib.sha256()

    def add(value: object) -> None:
        hasher.update(type(value).__name__.encode())
        if isinstance(value, Mapping):
            for key, child in value.items():
                hasher.update(repr(key).encode())
                add(child)
        elif isinstance(value, list | tuple):
            for child in value:
                add(child)
        elif isinstance(value, np.ndarray | np.generic):
            hasher.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
        else:
            hasher.update(repr(value).encode())

    add(value)
    return hasher.hexdigest()


def outcomes(directory: Path) -> Mapping[str, Mapping[str, str]]:
    """Load each checkpoint in a directory, and return the hash of its value or the type of the error."""
    results: dict[str, Mapping[str, str]] = {}
    for root in sorted(directory.rglob("checkpoint.json")):
        path = root.parent
        results[str(path.relative_to(directory))] = {
            "verify": _outcome(partial(ckptcore.verify, path)),
            "load": _outcome(partial(ckptcore.load, path)),
            "load_checkpointables": _outcome(partial(ckptcore.load_checkpointables, path)),
        }
    return results


def _outcome(load: Callable[[], object]) -> str:
    try:
        value = load()
        return str(value.ok) if isinstance(value, VerifyReport) else digest(value)
    except ckptcore.CheckpointError as error:
        return type(error).__name__


def use(directory: str) -> object:
    """Save, load and train. Return our import packages and our distributions in this environment."""
    scratch = Path(directory)
    state = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "step": 3}
    ckptcore.save(scratch / "state", state)
    assert digest(ckptcore.load(scratch / "state")) == digest(state)
    handle = ckptcore.save_async(scratch / "later", state)
    handle.result()
    with ckptcore.open(scratch / "later") as checkpoint:
        assert np.array_equal(checkpoint["w"][1:, :2], state["w"][1:, :2])  # type: ignore[index]
    assert ckptcore.verify(scratch / "state").ok
    ckptcore.save_checkpointables(scratch / "several", {"model": state, "data": {"position": 7}})
    assert digest(ckptcore.load_checkpointables(scratch / "several")["model"]) == digest(state)
    ckptcore.delete(scratch / "state")
    assert not (scratch / "state").exists()
    _train(scratch / "run", until=3)
    assert _train(scratch / "run", until=5) == 3
    installed = {
        str(distribution.metadata["Name"]): distribution.version for distribution in importlib.metadata.distributions()
    }
    return {
        "distributions": installed,
        "modules": sorted(name for name in sys.modules if name.startswith("ckptcore_")),
        "file": ckptcore.__file__,
    }


def _train(directory: Path, *, until: int) -> int:
    """Resume a run and save each step. Return the step from which it resumed, or 0."""
    with ckptcore.Checkpointer(directory) as checkpointer:
        weights, first = np.zeros(4), 0
        if checkpointer.latest is not None:
            first = checkpointer.latest
            weights = checkpointer.load(first)["w"]
            assert np.array_equal(weights, np.full(4, float(first)))
        for step in range(first + 1, until + 1):
            weights = weights + 1
            checkpointer.save(step, {"w": weights})
    return first


def golden(directory: str) -> object:
    """Load golden checkpoints."""
    return outcomes(Path(directory))


def missing(directory: str) -> object:
    """Use each feature that other distributions add. Return the type and the message of each error."""
    scratch = Path(directory)
    errors: dict[str, Mapping[str, str]] = {}
    for distribution in DISTRIBUTIONS:
        asked: dict[str, Callable[[], object]] = {}
        for name in distribution.names:
            asked[f"name {name}"] = partial(getattr, ckptcore, name)
        for scheme in distribution.schemes:
            asked[f"scheme {scheme}"] = partial(ckptcore.load, f"{scheme}://bucket/state")
        for layout in distribution.layouts:
            state: Mapping[str, object] = {"w": np.ones(3)}
            asked[f"layout {layout}"] = partial(ckptcore.save, scratch / layout, state, layout=layout)
        for package in distribution.types:
            state = {"w": type("Array", (), {"__module__": f"{package}.arrays"})()}
            asked[f"type {package}"] = partial(ckptcore.save, scratch / package, state)
        errors[distribution.extra] = {name: _error(ask) for name, ask in asked.items()}
    return errors


def _error(ask: Callable[[], object]) -> str:
    try:
        ask()
    except ckptcore.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def added(extra: str, directory: str) -> object:
    """Use the features that the distribution of an extra adds. Return the failures."""
    scratch = Path(directory)
    (distribution,) = [candidate for candidate in DISTRIBUTIONS if candidate.extra == extra]
    importlib.import_module(distribution.package)
    failed: dict[str, str] = {}
    for name in distribution.names:
        getattr(ckptcore, name)
    state = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    for layout in distribution.layouts:
        try:
            ckptcore.save(scratch / layout, state, layout=layout)
        except UnsupportedLeafError:  # this layout can only read
            continue
        if digest(ckptcore.load(scratch / layout)) != digest(state):
            failed[f"layout {layout}"] = "another value"
    for entry in importlib.metadata.entry_points(group="ckptcore"):
        entry.load()
    for package in distribution.types:
        if package == "torch":
            value: Any = importlib.import_module("torch").arange(3)
        elif package == "jax":
            value = importlib.import_module("jax").numpy.arange(3)
        else:
            continue
        ckptcore.save(scratch / package, {"w": value})
        loaded = ckptcore.load(scratch / package, {"w": value})["w"]
        if type(loaded) is not type(value) or np.asarray(loaded).tolist() != [0, 1, 2]:
            failed[f"type {package}"] = repr(loaded)
    return failed


_PROGRAMS: Final[Mapping[str, Callable[..., object]]] = {
    "use": use,
    "golden": golden,
    "missing": missing,
    "added": added,
}


if __name__ == "__main__":
    print(json.dumps(_PROGRAMS[sys.argv[1]](*sys.argv[2:])))
