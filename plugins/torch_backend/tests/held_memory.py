"""Operations on tensors whose memory is watched, for tests of all layouts that support tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from ckptcore_testing import FaultPlan, FullAfter, with_faults

import ckptcore
from ckptcore import hookimpl
from ckptcore.errors import CheckpointError
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from ckptcore.runtime import runtime_of

_SIZE: Final = 1 << 18
"""Number of elements of a large tensor, which does not share its memory with other tensors."""


class State:
    """Tensors to save or to load into. Their memory belongs to NumPy arrays, because arrays support weak references."""

    def __init__(self, value: float = 1.0) -> None:
        """Create large and small tensors, a Parameter, and a tensor that is not contiguous."""
        self._watched: list[weakref.ref[Any]] = []
        self.tree: dict[str, Any] = {
            "large": self._tensor(_SIZE, value),
            "small": self._tensor(3, value),
            "parameter": torch.nn.Parameter(self._tensor(_SIZE, value)),
            "transposed": self._tensor(_SIZE, value).view(512, 512).t(),
            "bf16": self._tensor(_SIZE, value).view(torch.bfloat16),
            "step": 3,
        }
        self._watched += [weakref.ref(leaf) for leaf in self.tree.values() if isinstance(leaf, torch.Tensor)]

    def _tensor(self, size: int, value: float) -> torch.Tensor:
        memory = np.full(size, value, np.float32)
        self._watched.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    def forget(self) -> None:
        """Delete the tree."""
        self.tree = {}

    @property
    def held(self) -> int:
        """Return the number of tensors and arrays still in memory."""
        return sum(watched() is not None for watched in self._watched)


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector, so that objects in reference cycles stay in memory and are detected."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class _Full:
    """A plugin with a storage that raises an error after 1 MiB, as if the disk were full."""

    plan: FaultPlan = field(default_factory=lambda: FaultPlan(FullAfter(1 << 20)))

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(installed_plugins().storage("file")(url.replace("full", "file", 1), options), self.plan)

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"full": self._open}


Operation = Callable[[Path, State, str], object]
"""A function that runs an operation with a path, a state and a layout.

The caller keeps its result, as a user would.
"""


def _context(**options: Any) -> ckptcore.Context:
    return ckptcore.Context(durability="none", **options)


def _save(path: Path, state: State, layout: str) -> object:
    context = _context()
    ckptcore.save(path / "c", state.tree, layout=layout, context=context)
    return context


def _save_async(path: Path, state: State, layout: str) -> object:
    context = _context()
    handle = ckptcore.save_async(path / "c", state.tree, layout=layout, context=context)
    handle.result()
    return handle, context


def _save_async_untaken(path: Path, state: State, layout: str) -> object:
    context = _context()
    handle = ckptcore.save_async(path / "c", state.tree, layout=layout, context=context)
    runtime_of(context).saves.wait()
    return handle, context


def _save_bounded(path: Path, state: State, layout: str) -> object:
    context = _context(memory=ckptcore.context.MemoryOptions(save_bytes=1 << 20))
    handle = ckptcore.save_async(path / "c", state.tree, layout=layout, context=context)
    handle.result()
    return handle, context


def _refused(path: Path, state: State, layout: str) -> object:
    """Run two saves that fail before they copy any data."""
    context = _context()
    (path / "there").mkdir()
    (path / "there" / "file").touch()
    _fails(lambda: ckptcore.save(path / "there", state.tree, layout=layout, context=context))
    _fails(lambda: ckptcore.save(path / "c", [state.tree, object()], layout=layout, context=context))
    return context


def _full(path: Path, state: State, layout: str) -> object:
    context = _context(plugins=ckptcore.context.PluginOptions(extra=(_Full(),)))
    _fails(lambda: ckptcore.save(f"full://{path}/c", state.tree, layout=layout, context=context))
    return context


def _full_async(path: Path, state: State, layout: str) -> object:
    context = _context(plugins=ckptcore.context.PluginOptions(extra=(_Full(),)))
    handle = ckptcore.save_async(f"full://{path}/c", state.tree, layout=layout, context=context)
    runtime_of(context).saves.wait()
    _fails(handle.result)
    return handle, context


def _fails(act: Callable[[], object]) -> None:
    try:
        act()
    except CheckpointError:
        return
    raise AssertionError("the operation did not fail")


def _load(path: Path, state: State, layout: str) -> object:
    context = _context()
    _save(path, State(2.0), layout)
    loaded = ckptcore.load(path / "c", state.tree, context=context)
    assert loaded["large"][0] == 2 and state.tree["large"][0] == 1
    return loaded, context


def _load_into(path: Path, state: State, layout: str) -> object:
    context = _context()
    _save(path, State(2.0), layout)
    ckptcore.load_into(path / "c", state.tree, context=context)
    assert state.tree["large"][0] == 2 and state.tree["transposed"][5, 3] == 2
    return context


def _load_other_shape(path: Path, state: State, layout: str) -> object:
    context = _context()
    other = State(2.0)
    other.tree["small"] = torch.ones(4)
    _save(path, other, layout)
    _fails(lambda: ckptcore.load(path / "c", state.tree, context=context))
    _fails(lambda: ckptcore.load_into(path / "c", state.tree, context=context))
    return context


def _load_damaged(path: Path, state: State, layout: str) -> object:
    context = _context()
    _save(path, State(2.0), layout)
    largest = max((path / "c").iterdir(), key=lambda file: file.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(b"damaged")
    _fails(lambda: ckptcore.load(path / "c", state.tree, context=context))
    _fails(lambda: ckptcore.load_into(path / "c", state.tree, context=context))
    return context


def _checkpointer(path: Path, state: State, layout: str) -> object:
    context = _context()
    checkpointer = ckptcore.Checkpointer(path / "run", layout=layout, context=context)
    for step in range(3):
        checkpointer.save(step, state.tree)
    checkpointer.wait()
    return checkpointer, checkpointer.load()


OPERATIONS: Final[Mapping[str, Operation]] = {
    "save": _save,
    "save_async": _save_async,
    "save_async, result not taken": _save_async_untaken,
    "save_async with a bound": _save_bounded,
    "saves that are refused": _refused,
    "a save to a full disk": _full,
    "save_async to a full disk": _full_async,
    "load": _load,
    "load_into": _load_into,
    "loads of another shape": _load_other_shape,
    "loads of a damaged checkpoint": _load_damaged,
    "steps of a Checkpointer": _checkpointer,
}
