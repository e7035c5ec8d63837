"""Asynchronous saves: the memory that they own, their order, and their errors, of which none is lost."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.builtin.memory import MemoryStorage, MemoryStorages
from ckptcore.errors import BackgroundSaveError
from ckptcore.protocols import StorageOptions
from ckptcore.results import SaveHandle
from ckptcore.runtime import runtime_of


class Gate:
    """A plugin with the storage ``gate://`` in memory. Writes wait for `open`, and then succeed or raise `error`."""

    def __init__(self) -> None:
        self.memory = MemoryStorages()
        self.open = threading.Event()
        self.error: Exception | None = None
        self.error_of_claim: Exception | None = None
        self.waiting = threading.Event()

    @ckptcore.hookimpl
    def ckpt_storages(self) -> dict[str, Any]:
        return {"gate": self.storage}

    def storage(self, url: str, options: StorageOptions) -> Any:
        inner = self.memory.open(url.replace("gate://", "memory://"), options)
        gate = self

        class Guarded(MemoryStorage):
            def open_writer(self, key: str, size: int | None = None) -> Any:
                gate.pass_through()
                return super().open_writer(key, size)

            def open_new(self, key: str, size: int | None = None) -> Any:
                gate.pass_through()
                return super().open_new(key, size)

            def put(self, key: str, data: bytes, *, condition: Any = None) -> str:
                if not key.endswith("checkpoint.json"):
                    gate.pass_through()
                elif gate.error_of_claim is not None:
                    raise gate.error_of_claim
                return super().put(key, data, condition=condition)

        return Guarded(inner._store, inner._prefix, inner._url)  # shares the objects of `inner`

    def pass_through(self) -> None:
        self.waiting.set()
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate() -> Gate:
    return Gate()


def state(value: float) -> dict[str, Any]:
    return {"large": np.full((600, 1000), value), "small": np.full(3, value), "view": np.full((50, 50), value).T[::2]}


def all_are(loaded: Any, value: float) -> bool:
    return all((array == value).all() for array in loaded.values())


def test_changes_after_the_call_are_not_in_the_checkpoint(gate: Gate) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[gate]))
    tree = state(1.0)
    handle = ckptcore.save_async("gate://a/b", tree, context=context)
    for array in tree.values():
        array[...] = 2.0
    tree["new"] = 1
    assert not handle.done()
    gate.open.set()
    handle.result()
    assert handle.done() and handle.exception() is None
    assert handle.progress.done == handle.progress.total > 0
    loaded = ckptcore.load("gate://a/b", context=context)
    assert set(loaded) == {"large", "small", "view"} and all_are(loaded, 1.0)


def test_nothing_of_an_unfinished_save_can_be_loaded(gate: Gate) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[gate]))
    handle = ckptcore.save_async("gate://a/b", state(1.0), context=context)
    assert gate.waiting.wait(60)
    with pytest.raises(ckptcore.errors.UncommittedCheckpointError, match="not committed"):
        ckptcore.load("gate://a/b", context=context)
    gate.open.set()
    handle.result()


def test_a_program_can_wait_until_a_location_is_claimed(gate: Gate) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[gate]))
    handle = ckptcore.save_async("gate://a/b", state(1.0), context=context)
    handle.wait_for_claim()
    assert not handle.done()
    with pytest.raises(ckptcore.errors.UncommittedCheckpointError, match="not committed"):
        ckptcore.metadata("gate://a/b", context=context)
    gate.open.set()
    handle.result()
    handle.wait_for_claim()


def test_the_wait_for_a_claim_ends_when_it_fails(gate: Gate) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[gate]))
    gate.error_of_claim = OSError("the disk is on fire")
    handle = ckptcore.save_async("gate://a/b", state(1.0), context=context)
    handle.wait_for_claim()
    with pytest.raises(OSError, match="on fire"):
        handle.result()


def test_a_second_save_queues_or_waits_as_the_context_says(gate: Gate) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[gate]), when_busy="queue")
    first = ckptcore.save_async("gate://a/1", state(1.0), context=context)
    second = ckptcore.save_async("gate://a/2", state(2.0), context=context)
    assert not first.done() and not second.done()
    waiting = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[gate]), when_busy="wait")
    third = ckptcore.save_async("gate://a/3", state(3.0), context=waiting)
    began = threading.Event()
    fourth: list[SaveHandle] = []

    def save_another() -> None:
        began.set()
        fourth.append(ckptcore.save_async("gate://a/4", state(4.0), context=waiting))

    thread = threading.Thread(target=save_another)
    thread.start()
    assert began.wait(60)
    assert not third.done() and fourth == []
    gate.open.set()
    thread.join()
    for number, handle in enumerate([first, second, third, fourth[0]], 1):
        handle.result()
        assert all_are(ckptcore.load(f"gate://a/{number}", context=context), float(number))


def test_an_error_surfaces_at_result(gate: Gate) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[gate]))
    gate.error = OSError("the disk is on fire")
    gate.open.set()
    handle = ckptcore.save_async("gate://a/b", state(1.0), context=context)
    with pytest.raises(OSError, match="on fire"):
        handle.result()
    gate.error = None
    ckptcore.save("gate://a/b", state(2.0), context=context)  # succeeds, because the error was read
    assert all_are(ckptcore.load("gate://a/b", context=context), 2.0)


@pytest.mark.parametrize("begin", [ckptcore.save, ckptcore.save_async])
def test_an_unread_error_surfaces_at_the_next_save(gate: Gate, begin: Any) -> None:
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[gate]))
    gate.error = OSError("the disk is on fire")
    gate.open.set()
    ckptcore.save_async("gate://a/b", state(1.0), context=context)
    runtime_of(context).saves.wait()
    gate.error = None
    with pytest.raises(BackgroundSaveError, match="gate://a/b failed: the disk is on fire"):
        begin("gate://a/c", state(2.0), context=context)
    ckptcore.save("gate://a/c", state(2.0), context=context)


@pytest.mark.system
def test_an_unread_error_surfaces_at_exit(tmp_path: Path) -> None:
    program = (
        "import ckptcore, numpy\n"
        "from ckptcore.io import object_writes\n"
        "def broken(*arguments, **options): raise OSError('the disk is on fire')\n"
        "object_writes.ObjectRecorder.write_many = broken\n"
        f"ckptcore.save_async({str(tmp_path / 'c')!r}, {{'w': numpy.ones(3)}})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == f"ckptcore: the save to {tmp_path / 'c'} failed: OSError: the disk is on fire\n"


@pytest.mark.system
def test_a_program_that_ends_lets_its_saves_finish(tmp_path: Path) -> None:
    program = f"import ckptcore, numpy; ckptcore.save_async({str(tmp_path / 'c')!r}, {{'w': numpy.ones(300_000)}})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (ckptcore.load(tmp_path / "c")["w"] == 1).all()


@pytest.mark.parametrize("limit", [1, 10_000, 5_000_000, 100_000_000])
def test_a_save_in_bounded_memory_blocks_the_caller_and_stores_everything(limit: int, tmp_path: Path) -> None:
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=limit, load_bytes=limit))
    tree = {f"{number}": np.full(5000, number, "f4" if number % 2 else "f8") for number in range(40)}
    handle = ckptcore.save_async(tmp_path / "c", tree, context=context)
    for array in tree.values():
        array[...] = -1
    handle.result()
    loaded = ckptcore.load(tmp_path / "c", context=context)
    assert all((array == int(name)).all() for name, array in loaded.items())


def test_a_bounded_save_that_fails_does_not_hang(gate: Gate) -> None:
    gate.error = OSError("the disk is on fire")
    gate.open.set()
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=[gate]), memory=ckptcore.context.MemoryOptions(save_bytes=1000)
    )
    tree = {f"{number}": np.full(500, number) for number in range(40)}
    handle = ckptcore.save_async("gate://a/b", tree, context=context)
    with pytest.raises(OSError, match="on fire"):
        handle.result()


@pytest.mark.parametrize("limit", [None, 1000])
def test_the_state_is_released_after_the_save(limit: int | None, tmp_path: Path) -> None:
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=limit))
    array = np.ones((100, 100))
    reference = weakref.ref(array)
    handle = ckptcore.save_async(tmp_path / "c", {"w": array}, context=context)
    handle.result()
    del array
    gc.collect()
    assert reference() is None


def test_load_async_returns_the_same_as_load(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(3)})
    handle = ckptcore.load_async(tmp_path / "c")
    assert handle.result()["w"].tolist() == [1, 1, 1] and handle.done() and handle.exception() is None
    with pytest.raises(ckptcore.errors.CheckpointNotFoundError):
        ckptcore.load_async(tmp_path / "d").result()


_AFTER_MAIN = """
import sys, threading
import numpy as np
import ckptcore
from ckptcore.policies import LatestN

directory = sys.argv[1]
state = {"w": np.arange(1 << 12, dtype=np.float32)}

def train():
    threading.main_thread().join()
    ckptcore.save(directory + "/blocking", state)
    ckptcore.save_async(directory + "/first", state).result()
    ckptcore.save_async(directory + "/second", state)
    assert len(list(ckptcore.open(directory + "/first").iter_boxes())) == 1
    assert ckptcore.load_async(directory + "/first").result()["w"][7] == 7
    with ckptcore.Checkpointer(directory + "/run", preservation_policy=LatestN(1)) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state)
    print([str(step) for step in ckptcore.CheckpointReader(directory + "/run").steps])

threading.Thread(target=train).start()
"""


@pytest.mark.system
def test_a_thread_that_outlives_the_main_thread_saves_and_loads(tmp_path: Path) -> None:
    """The executors of `concurrent.futures` take no more work once the main thread has ended."""
    done = subprocess.run(
        [sys.executable, "-c", _AFTER_MAIN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "['2']\n")
    assert ckptcore.load(tmp_path / "second")["w"][7] == 7


_AT_EXIT = """
import atexit, sys
import numpy as np
import ckptcore

def at_exit():
    handle = ckptcore.save_async(sys.argv[1], {"w": np.arange(8)})
    assert handle.done() and handle.exception() is None

atexit.register(at_exit)
"""


@pytest.mark.system
def test_a_save_at_exit_is_committed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AT_EXIT, str(tmp_path / "saved")], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert ckptcore.load(tmp_path / "saved")["w"].tolist() == list(range(8))


@pytest.mark.system
def test_a_bounded_save_at_exit_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    """The writer waits for copies that the caller makes, so it needs a thread. At exit no thread can be started."""
    program = _AT_EXIT.replace('{"w": np.arange(8)})', '{"w": np.arange(8)}, context=bounded)').replace(
        "def at_exit():",
        "bounded = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=1))\n\ndef at_exit():",
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "CheckpointError: cannot save to" in done.stderr and "no thread can be started" in done.stderr
    assert not (tmp_path / "saved").exists()


_IMPORTS = """
import sys, threading
import numpy as np
import ckptcore
from ckptcore_testing import ThreadJob
from ckptcore.context import Context, JobOptions

late = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread().name.startswith("ckptcore-save") and name.startswith("ckptcore"):
            late.append(name)

def save(context):
    ckptcore.save_async(sys.argv[1], {"w": np.arange(8)}, context=context).result()

sys.meta_path.insert(0, Finder())
if sys.argv[2] == "1":
    save(Context())
else:
    ThreadJob(int(sys.argv[2])).run(lambda coordinator: save(Context(job=JobOptions(coordinator=coordinator))))
assert not late, late
"""


@pytest.mark.system
@pytest.mark.parametrize("processes", [1, 2])
def test_the_thread_of_a_save_imports_no_module_of_ours(processes: int, tmp_path: Path) -> None:
    """A forked process hangs in an import of a module if a thread was importing the module during the fork."""
    program = [sys.executable, "-c", _IMPORTS, str(tmp_path / "saved"), str(processes)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
