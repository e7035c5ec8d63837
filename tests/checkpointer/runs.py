"""Runs for tests of a Checkpointer: states, storages, and damage of steps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
from ckptcore_testing.far_storage import FarRequestKind, FarStorage
from ckptcore_testing.faults import Fault, FaultPlan, Operation, Step
from ckptcore_testing.faulty_storage import with_faults

import ckptcore
from ckptcore.builtin.local import open_local
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.commit.location import open_directory
from ckptcore.context import PluginOptions, default_context
from ckptcore.events import Observer
from ckptcore.hookspecs import hookimpl
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import Coordinator, StorageBackend, StorageOpener, StorageOptions
from ckptcore.runtime import runtime_of

T = TypeVar("T")

ROOT: Final = "checkpoint.json"


def tree(step: int) -> dict[str, Any]:
    """Return the state at a step. Every number in it depends on the step."""
    return {"w": np.full((3, 5), step, np.float32), "b": np.full(7, step, np.int64), "step": step}


def assert_is_step(value: Mapping[str, Any], step: int) -> None:
    """Assert that a value is the complete state of a step."""
    assert sorted(value) == ["b", "step", "w"]
    assert value["step"] == step
    assert (value["w"] == step).all() and value["w"].shape == (3, 5)
    assert (value["b"] == step).all() and value["b"].shape == (7,)


def save_steps(run: ckptcore.Checkpointer, steps: Sequence[int], **arguments: Any) -> None:
    """Save steps one after another, and wait for the saves."""
    for step in steps:
        assert run.save(step, tree(step), **arguments) is not None
    run.wait()


def store_of(directory: str) -> StorageBackend:
    """Return the storage of a directory of steps, for access without the run."""
    context = default_context()
    return open_directory(directory, runtime_of(context).storages)


def keys_of(directory: str, prefix: str = "") -> list[str]:
    """Return the keys of all objects."""
    return list(store_of(directory).list(prefix))


def array_key(directory: str, step: str) -> str:
    """Return the key of the file with the arrays of a step."""
    (key,) = [key for key in keys_of(directory, step) if key.endswith(".safetensors")]
    return key


def flip(directory: str, key: str, place: int = -1) -> None:
    """Flip a bit of an object."""
    store = store_of(directory)
    data = bytearray(store.get(key))
    data[place] ^= 4
    store.put(key, bytes(data))


def cut(directory: str, key: str) -> None:
    """Truncate an object."""
    store = store_of(directory)
    store.put(key, store.get(key)[:-9])


def remove(directory: str, key: str) -> None:
    """Remove an object."""
    store_of(directory).delete([key])


class Watch(FaultPlan):
    """A plan that counts operations. A function of the test can delay operations or make them fail.

    Attributes:
        before, after: called before and after each operation, on its thread, with its name and keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[str, Sequence[str]], None] = _nothing
        self.after: Callable[[str, Sequence[str]], None] = _nothing

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """Run the action of the test, then the operation."""
        self.before(name, keys)
        return _WatchedStep(self, super().begin(name, keys, offset, nbytes).operation, ())

    def count(self, name: str) -> int:
        """Return the number of calls of an operation."""
        return sum(operation.name == name for operation in self.operations)


class _WatchedStep(Step):
    def __init__(self, watch: Watch, operation: Operation, faults: Sequence[Fault]) -> None:
        super().__init__(watch, operation, faults)
        self._watch = watch

    def run(self, action: Callable[[], T], half: Callable[[], object] | None = None) -> T:
        result = super().run(action, half)
        self._watch.after(self.operation.name, self.operation.keys)
        return result


def _nothing(name: str, keys: Sequence[str]) -> None:
    pass


class _Plugin:
    def __init__(self, openers: Mapping[str, StorageOpener]) -> None:
        self._openers = openers

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return self._openers


def _open(plan: FaultPlan, kind: str, url: str, options: StorageOptions) -> StorageBackend:
    rest = url.partition("://")[2]
    inner = open_local("/" + rest, options) if kind == "local" else _open_there(kind, rest, options)
    return with_faults(inner, plan)


def _open_there(scheme: str, rest: str, options: StorageOptions) -> StorageBackend:
    return installed_plugins().storage(scheme)(f"{scheme}://{rest}", options)


def watched(
    plan: FaultPlan, coordinator: Coordinator | None = None, observers: Sequence[Observer] = ()
) -> ckptcore.Context:
    """Return a Context whose locations from `through` use a plan."""
    openers = {f"seen-{kind}": functools.partial(_open, plan, kind) for kind in ("local", "memory", "s3", "gs", "az")}
    return ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=(_Plugin(openers),)),
        io=ckptcore.context.IOOptions(threads=1),
        job=ckptcore.context.JobOptions(coordinator=coordinator),
        observers=observers,
    )


def through(directory: str) -> str:
    """Return the location of a directory for a Context from `watched`."""
    kind, rest = directory.split("://") if "://" in directory else ("local", directory[1:])
    return f"seen-{kind}://{rest}"


def writes_arrays(name: str, keys: Sequence[str]) -> bool:
    """Return True if an operation begins an object with arrays. On object stores, a put writes a small object."""
    return name in ("open_writer", "open_new") or (name == "put" and keys[0].endswith(".safetensors"))


class Gate:
    """A gate that stops every save before it writes its arrays, until the gate is open.

    Attributes:
        arrived: set when a save waits at the gate.
    """

    def __init__(self, watch: Watch) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()
        watch.before = self._stop

    def _stop(self, name: str, keys: Sequence[str]) -> None:
        if writes_arrays(name, keys):
            self.arrived.set()
            assert self._open.wait(60)

    def open(self) -> None:
        """Release the waiting operations."""
        self._open.set()

    def close(self) -> None:
        """Close the gate for later saves."""
        self.arrived.clear()
        self._open.clear()


class Meeting:
    """Far storages ``far://`` in which requests for the roots of steps 2 and 3 wait for each other.

    Attributes:
        left: how many times more the requests wait for each other.
        context: a Context with these storages.
    """

    def __init__(self) -> None:
        self.left = 0
        self.context = ckptcore.Context(plugins=PluginOptions(extra=(self,)))
        self._both = threading.Barrier(2, self._meet)
        self._objects = MemoryStorages()

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"far": self._open}

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return _MeetingStorage(self, self._objects.open(url.replace("far://", "memory://"), options))

    def _meet(self) -> None:
        self.left -= 1

    def wait(self, key: str) -> None:
        """Wait for the other request, if `left` is not 0."""
        if self.left and key in (f"2/{ROOT}", f"3/{ROOT}"):
            self._both.wait(30)  # fails if the requests do not run at the same time


class _MeetingStorage(FarStorage):
    def __init__(self, meeting: Meeting, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._meeting = meeting

    @contextmanager
    def request(self, kind: FarRequestKind, key: str, start: int = 0, stop: int = 0) -> Iterator[None]:
        with super().request(kind, key, start, stop):
            self._meeting.wait(key)
            yield
