"""Cases in which tensorstore could abort the process. Each runs in a subprocess, which must exit normally."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorstore
from ckptcore_orbax import OcdbtLayout

import ckptcore
from ckptcore.protocols import Layout

pytestmark = pytest.mark.system

_FAST: Final = ckptcore.Context(durability="none")
_ARRAYS: Final = 6


def _run(program: str, *arguments: object) -> str:
    """Run a program. Assert that it exits normally, and return its output."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program, *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout


@pytest.fixture(params=["ckptcore", "other"])
def compressed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A compressed checkpoint of ckptcore, and one of other software.

    ckptcore decodes its own checkpoints in memory. tensorstore itself reads those of other software.
    """
    location = tmp_path / "checkpoint"
    random = np.random.default_rng(0)
    state = {f"w{number}": random.integers(0, 20, 1 << 18, np.int32) for number in range(_ARRAYS)}
    layout: Layout = OcdbtLayout(compression="zstd", chunk_bytes=1 << 16)
    ckptcore.save(location, state, layout=layout, context=_FAST)
    if request.param == "other":
        for path in location.glob("checkpoint.*"):
            path.unlink()
    return location


# --- forked children --------------------------------------------------------------------------------------------------

_FORK: Final = """
import os, signal, sys, warnings
import ckptcore
from ckptcore_orbax import OcdbtLayout

warnings.simplefilter("ignore")  # Python warns of forks in a process with threads
location, scratch, before = sys.argv[1:]
layout = OcdbtLayout(compression="zstd")
state = {"w": [1.5] * 3}


def attempt(work):
    try:
        work()
    except ckptcore.CheckpointError as error:
        assert "forked" in str(error) and type(error) is ckptcore.CheckpointError, repr(error)
        print("refused", flush=True)
    else:
        print("done", flush=True)


if before == "load":
    ckptcore.load(location)
import tensorstore
child = os.fork()
if child == 0:
    signal.alarm(60)
    import numpy as np
    attempt(lambda: ckptcore.load(location))
    attempt(lambda: ckptcore.save(scratch, {"w": np.arange(1000)}, layout=layout))
    attempt(lambda: ckptcore.save(scratch, {"w": np.arange(1000)}, layout="ocdbt", overwrite=True))
    attempt(lambda: ckptcore.load(scratch))
    # At exit, tensorstore takes a lock. A thread of the parent may have held the lock at the fork.
    if before == "load":
        os._exit(0)
    sys.exit(0)  # the child also runs the exit handlers
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
ckptcore.load(location)
"""


def test_a_forked_child_raises_an_error_instead_of_aborting(compressed: Path, tmp_path: Path) -> None:
    """Operations that do not use tensorstore succeed in the child."""
    assert _run(_FORK, compressed, tmp_path / "scratch", "load").split() == ["refused", "refused", "done", "done"]
    assert list(ckptcore.load(tmp_path / "scratch")["w"]) == list(range(1000))


def test_a_child_forked_before_the_first_use_of_tensorstore_can_use_it(compressed: Path, tmp_path: Path) -> None:
    assert _run(_FORK, compressed, tmp_path / "scratch", "nothing").split() == ["done"] * 4


# --- exit of the program ----------------------------------------------------------------------------------------------

_END: Final = """
import sys, threading
import ckptcore
from ckptcore_orbax import OcdbtLayout

location, task, loads = sys.argv[1:]
context = ckptcore.Context(durability="none")
layout = OcdbtLayout(compression="zstd", chunk_bytes=1 << 16)
state = ckptcore.load(location)
begun = threading.Event()


def work(number):
    while True:
        if task == "load":
            ckptcore.load(location)
        else:
            ckptcore.save(f"memory://end/{number}", state, layout=layout, overwrite="non-atomic", context=context)
        begun.set()


for number in range(3):
    threading.Thread(target=work, args=(number,), daemon=True).start()
begun.wait()
for _ in range(int(loads)):
    ckptcore.load(location)
"""


@pytest.mark.parametrize("task", ["load", "save"])
def test_the_exit_waits_for_daemon_threads_that_use_tensorstore(task: str, compressed: Path) -> None:
    for loads in (0, 1):  # a load in the main thread delays the exit
        _run(_END, compressed, task, loads)


_END_AND_JOIN: Final = """
import atexit, sys, threading
import ckptcore

stopped = threading.Event()
begun = threading.Event()


def work():
    try:
        while not stopped.is_set():
            ckptcore.load(sys.argv[1])
            begun.set()
    except ckptcore.CheckpointError as error:
        assert "is ending, but" in str(error) and "join the thread first" in str(error), error


def stop():
    stopped.set()
    thread.join()
    ckptcore.load(sys.argv[1])  # exit handlers may still use tensorstore
    print("joined")


atexit.register(stop)  # registered before tensorstore is used, so called last
thread = threading.Thread(target=work, daemon=True)
thread.start()
begun.wait()
"""


def test_an_exit_handler_can_join_a_thread_that_uses_tensorstore(compressed: Path) -> None:
    assert _run(_END_AND_JOIN, compressed) == "joined\n"


# --- chunks that request memory ---------------------------------------------------------------------------------------

_BOMB: Final = """
import resource, sys
import numpy as np
import ckptcore
import tensorstore
from ckptcore.plugins import installed_plugins
from ckptcore_testing import FaultPlan, with_faults
from ckptcore.hookspecs import hookimpl


class WithoutAddress:
    @hookimpl
    def ckpt_storages(self):
        def open_storage(url, options):
            files = installed_plugins().storage("file")(url.replace("nowhere", "file", 1), options)
            return with_faults(files, FaultPlan())
        return {"nowhere": open_storage}


spec = {"driver": "zarr3", "kvstore": "memory://"}
tensorstore.open(spec, create=True, dtype="int8", shape=[3]).result()[:].write(1).result()
context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=(WithoutAddress(),)))
with open("/proc/self/statm") as counts:
    taken = int(counts.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (300 << 20),) * 2)
for scheme in ("file", "nowhere"):
    try:
        ckptcore.load(f"{scheme}://{sys.argv[1]}", context=context)
    except ckptcore.errors.CorruptCheckpointError as error:
        print(error)
"""
_BOMB_BYTES: Final = 1 << 29


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory in the way of Linux")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_small_chunk_that_blosc_decodes_to_half_a_gigabyte_is_refused(zarr_format: int, tmp_path: Path) -> None:
    """tensorstore allocates memory before decoding, and aborts the process if the memory is not available."""

    def write(size: int) -> Path:
        blosc = {"cname": "zstd", "clevel": 1, "shuffle": "noshuffle" if zarr_format == 3 else 0, "blocksize": 0}
        documents: Mapping[int, Mapping[str, Any]] = {
            2: {
                "chunks": [size],
                "dtype": "|u1",
                "compressor": {"id": "blosc", **blosc},
                "order": "C",
                "filters": None,
            },
            3: {
                "data_type": "uint8",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [size]}},
                "codecs": ["bytes", {"name": "blosc", "configuration": {**blosc, "typesize": 1}}, "crc32c"],
            },
        }
        directory = tmp_path / f"checkpoint-{size}"
        spec = {
            "driver": "zarr3" if zarr_format == 3 else "zarr",
            "kvstore": {"driver": "file", "path": f"{directory}/w/"},
            "metadata": {**documents[zarr_format], "shape": [size]},
        }
        array = tensorstore.open(spec, create=True).result()
        array.write(np.ones(size, np.uint8)).result()
        return directory

    checkpoint = write(64)
    chunk = "w/c/0" if zarr_format == 3 else "w/0"
    checkpoint.joinpath("_METADATA").write_text(
        '{"tree_metadata": {"(\'w\',)": {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": '
        '{"value_type": "np.ndarray", "skip_deserialize": false}}}, "use_ocdbt": false, '
        f'"store_array_data_equal_to_fill_value": true, "use_zarr3": {str(zarr_format == 3).lower()}}}'
    )
    assert ckptcore.load(checkpoint)["w"].sum() == 64
    bomb = write(_BOMB_BYTES) / chunk
    assert bomb.stat().st_size < 2 << 20
    bomb.replace(checkpoint / chunk)
    lines = _run(_BOMB, checkpoint).splitlines()
    assert len(lines) == 2 and all(f"states {_BOMB_BYTES} bytes; expected at most 64" in line for line in lines)
