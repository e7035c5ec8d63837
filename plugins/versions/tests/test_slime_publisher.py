"""A `Publisher` with the layout `slime`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_versions import Publisher, SlimeLayout, labels

import ckptcore
from ckptcore import ShardedArray
from plugins.versions.tests.slime_files import listed_files, pull, version_at


def weights(number: int) -> dict[str, Any]:
    array = np.random.default_rng(0).standard_normal((200, 64)).astype(ml_dtypes.bfloat16)
    array[number::50] *= ml_dtypes.bfloat16(1 + number)
    return {"w": array, "b": np.full(9, number, np.float32)}


def bytes_of(number: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in weights(number).items()}


def is_full(directory: Path, number: int) -> bool:
    return "delta_encoding" not in listed_files(version_at(directory, number))[0]


@pytest.mark.parametrize("layout", ["slime", SlimeLayout("overwrite", "adler32")], ids=["name", "options"])
def test_other_software_follows_a_publisher(layout: Any, tmp_path: Path) -> None:
    with Publisher(tmp_path, layout=layout, full_every=4, run="night") as versions:
        for number in range(1, 7):
            versions.publish(number, weights(number), step=10 * number)
    with Publisher(tmp_path, layout=layout, full_every=4) as versions:
        versions.publish(7, weights(7))
    for number in range(1, 8):
        assert pull(tmp_path, number) == bytes_of(number)
        loaded = ckptcore.load(version_at(tmp_path, number))
        assert {name: array.tobytes() for name, array in loaded.items()} == bytes_of(number)
    assert [number for number in range(1, 8) if is_full(tmp_path, number)] == [1, 5]
    assert (labels(version_at(tmp_path, 6)).step, labels(version_at(tmp_path, 7)).run) == (60, "night")


_AFTER_MAIN = """
import sys, threading
import numpy as np
from ckptcore_versions import Publisher

def publish():
    threading.main_thread().join()
    with Publisher(sys.argv[1], layout="slime") as versions:
        for number in (1, 2):
            versions.publish(number, {"w": np.arange(64.0) + (number == 2) * (np.arange(64) < 3)})

threading.Thread(target=publish).start()
"""


@pytest.mark.system
def test_a_delta_is_published_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    """As a delta in the background may be. The executors of `concurrent.futures` take no more work then."""
    done = subprocess.run(
        [sys.executable, "-c", _AFTER_MAIN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [is_full(tmp_path, number) for number in (1, 2)] == [True, False]
    assert ckptcore.load(version_at(tmp_path, 2))["w"][:4].tolist() == [1, 2, 3, 3]


def test_a_gap_begins_a_new_chain(tmp_path: Path) -> None:
    """Readers of this format apply every version between, one by one."""
    with Publisher(tmp_path, layout="slime") as versions:
        for number in (1, 2, 5, 6):
            versions.publish(number, weights(number))
    assert [number for number in (1, 2, 5, 6) if is_full(tmp_path, number)] == [1, 5]
    assert pull(tmp_path, 6) == bytes_of(6)
    assert listed_files(version_at(tmp_path, 5))[0]["version"] == "000005"


def test_other_arrays_begin_a_new_chain(tmp_path: Path) -> None:
    with Publisher(tmp_path, layout="slime") as versions:
        versions.publish(1, weights(1))
        versions.publish(2, {**weights(2), "new": np.ones(3)})
    with Publisher(tmp_path, layout="slime") as versions:
        versions.publish(3, {**weights(3), "new": np.ones(3)})
        versions.publish(4, weights(4))
        versions.publish(5, {**weights(5), "b": np.ones(3)})
    assert [number for number in range(1, 6) if is_full(tmp_path, number)] == [1, 2, 4, 5]
    assert pull(tmp_path, 3) == {**bytes_of(3), "new": np.ones(3).tobytes()}
    assert pull(tmp_path, 4) == bytes_of(4)


def test_ties_of_arrays_begin_a_new_chain(tmp_path: Path) -> None:
    """Files do not have an array that is tied to another, so engines would keep its old elements."""
    first, second = np.arange(50.0), np.arange(50.0) * 2
    states = [
        {"a": first, "b": second},
        {"a": first, "b": first},
        {"a": first, "b": first.copy()},
        {"a": first, "b": second},
    ]
    with Publisher(tmp_path, layout="slime") as versions:
        for number, state in enumerate(states, start=1):
            versions.publish(number, state)
    assert [number for number in range(1, 5) if is_full(tmp_path, number)] == [1, 2, 3]
    for number, state in enumerate(states, start=1):
        loaded = ckptcore.load(version_at(tmp_path, number))
        assert {name: array.tolist() for name, array in loaded.items()} == {
            name: array.tolist() for name, array in state.items()
        }


def test_a_job_publishes_the_arrays_of_each_process(tmp_path: Path) -> None:
    def publish(rank: int, context: ckptcore.Context) -> None:
        with Publisher(tmp_path, layout="slime", context=context) as versions:
            for number in range(1, 4):
                state = {}
                for owner, (name, array) in enumerate(weights(number).items()):
                    whole = ShardedArray.part(array, (0,) * array.ndim, array.shape)
                    state[name] = whole if owner == rank else ShardedArray(array.shape, array.dtype, [])
                versions.publish(number, state)

    run_ranks(2, publish)
    assert pull(tmp_path, 3) == bytes_of(3)
    assert len(listed_files(version_at(tmp_path, 3))[1]) == 2
