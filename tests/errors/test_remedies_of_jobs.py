"""Remedies in errors about jobs of several processes. Each test follows the text of a remedy."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import ArrayShard, Context, PerProcess, SafetensorsLayout, ShardedArray
from ckptcore.context import JobOptions, MemoryOptions, ReplicaOptions
from ckptcore.errors import CheckpointError, PluginError, UnsupportedLeafError
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from tests.errors.refusals import ONE, TWO

NAMES = {"Context": Context, "JobOptions": JobOptions, "ReplicaOptions": ReplicaOptions}


def _in_job(call: Callable[[Context, int], Any], *, collectives: bool = True, **options: Any) -> list[Any]:
    """Call a function in each of two processes."""
    network = ThreadNetwork(2)

    def run(coordinator: Coordinator) -> Any:
        connected = network.collectives(coordinator.rank) if collectives else None
        return call(
            Context(job=JobOptions(coordinator=coordinator, collectives=connected, **options)), coordinator.rank
        )

    return list(ThreadJob(2).run(run))


def _refused_in_job(
    call: Callable[[Context, int], Any], *texts: str, error: type[Exception] = CheckpointError, **options: Any
) -> str:
    """Return the error message of the first process. Both processes must raise an error."""

    def attempt(context: Context, rank: int) -> str:
        return refused(lambda: call(context, rank), *texts, error=error)

    return str(_in_job(attempt, **options)[0])


def test_objects_with_a_state_in_each_process(tmp_path: Path) -> None:
    def save(context: Context, rank: int) -> None:
        ckptcore.save(tmp_path / "c", {"w": ONE, "random": random.Random(rank)}, context=context)

    text = _refused_in_job(
        save,
        "random is a random.Random",
        "wrap it in PerProcess(...), or save it as a separate name in save_checkpointables",
        'save with Context(job=JobOptions(replicas=ReplicaOptions(objects="lowest_rank"))). Nothing was written',
        error=UnsupportedLeafError,
    )
    assert not (tmp_path / "c").exists()

    def wrapped(context: Context, rank: int) -> float:
        ckptcore.save(tmp_path / "wrapped", {"w": ONE, "random": PerProcess(random.Random(rank))}, context=context)
        target = random.Random()
        ckptcore.load_into(tmp_path / "wrapped", {"w": ONE * 0, "random": PerProcess(target)}, context=context)
        return target.random()

    def named(context: Context, rank: int) -> float:
        several = {"state": {"w": ONE}, "random": random.Random(rank)}
        ckptcore.save_checkpointables(tmp_path / "named", several, context=context)
        target = random.Random()
        ckptcore.load_checkpointables(tmp_path / "named", into={"random": target}, context=context)
        return target.random()

    expected = [random.Random(rank).random() for rank in range(2)]
    assert _in_job(wrapped) == _in_job(named) == expected
    _in_job(save, replicas=eval(text.partition("save with ")[2].partition(". Nothing")[0], NAMES).job.replicas)
    target = random.Random()
    ckptcore.load_into(tmp_path / "c", {"w": ONE * 0, "random": target})
    assert target.random() == expected[0]


def test_values_that_differ_between_ranks(tmp_path: Path) -> None:
    def save(state: Any, name: str = "c") -> Callable[[Context, int], None]:
        return lambda context, rank: ckptcore.save(tmp_path / name, state(rank), context=context)

    _refused_in_job(
        save(lambda rank: {"w": ONE, "position": rank}),
        "Wrap state that differs between ranks in PerProcess(...), and save different objects under different keys",
    )
    _in_job(save(lambda rank: {"w": ONE, "position": PerProcess(rank)}))
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE, "position": {0: 0, 1: 1}})
    _in_job(save(lambda rank: {"w": ONE, f"object{rank}": rank + 3}, "d"))
    assert same_value(ckptcore.load(tmp_path / "d"), {"w": ONE, "object0": 3, "object1": 4})


def test_arrays_that_differ_between_ranks(tmp_path: Path) -> None:
    large = np.arange(float(1 << 17))

    def save(context: Context, rank: int, *, layout: str = "zarr3", state: Any = None, name: str = "c") -> None:
        ckptcore.save(tmp_path / name, state or {"w": large + rank}, layout=layout, context=context)

    _refused_in_job(
        save,
        "w: different on rank 0; rank 1",
        "To store the array of every rank, wrap it in PerProcess(...). To store one for all, copy it from one rank",
        "or use the layout safetensors, which stores that of the lowest rank. Nothing was written",
    )
    _in_job(lambda context, rank: save(context, rank, state={"w": PerProcess(large + rank)}, name="every"))
    _in_job(lambda context, rank: save(context, rank, state={"w": large + 1}, name="copied"))
    _in_job(lambda context, rank: save(context, rank, layout="safetensors", name="lowest"))
    assert same_value(ckptcore.load(tmp_path / "every"), {"w": {0: large, 1: large + 1}})
    assert same_value(ckptcore.load(tmp_path / "copied"), {"w": large + 1})
    assert same_value(ckptcore.load(tmp_path / "lowest"), {"w": large})


def test_names_that_differ_between_ranks(tmp_path: Path) -> None:
    def save(names: Callable[[int], Any]) -> Callable[[Context, int], None]:
        return lambda context, rank: ckptcore.save_checkpointables(tmp_path / "c", names(rank), context=context)

    _refused_in_job(
        save(lambda rank: {f"model{rank}": {"w": ONE}}),
        "Save the same ones on every rank; only the trees may differ. Nothing was written",
    )
    _in_job(save(lambda rank: {"model": {f"w{rank}": ONE + rank}}))
    assert same_value(ckptcore.load_checkpointables(tmp_path / "c"), {"model": {"w0": ONE, "w1": ONE + 1}})


def _halves(rank: int) -> ShardedArray:
    return ShardedArray((6,), "float64", [ArrayShard(Box((3 * rank,), (3 * rank + 3,)), (ONE, TWO)[rank])])


def test_options_of_safetensors_that_differ(tmp_path: Path) -> None:
    def save(context: Context, rank: int, *, stems: tuple[str, str]) -> None:
        layout = SafetensorsLayout(stem=stems[rank], max_file_bytes=24)
        ckptcore.save(tmp_path / "c", {f"w{rank}": ONE + rank}, layout=layout, context=context)

    _refused_in_job(
        lambda context, rank: save(context, rank, stems=("model", "other")),
        "process 1 wrote other",
        "Pass SafetensorsLayout the same options in every process",
    )
    assert not (tmp_path / "c").exists()
    _in_job(lambda context, rank: save(context, rank, stems=("other", "other")))
    assert same_value(ckptcore.load(tmp_path / "c"), {"w0": ONE, "w1": ONE + 1})


@pytest.mark.parametrize("follow", ["layout", "location", "delete"])
def test_slices_among_other_files(follow: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    (tmp_path / "c" / "notes.txt").write_text("mine")

    def save(context: Context, rank: int, *, name: str = "c", **options: Any) -> None:
        ckptcore.save(tmp_path / name, {"w": _halves(rank)}, context=context, **options)

    _refused_in_job(
        lambda context, rank: save(context, rank, overwrite="keep-other-files"),
        "save with the layout dcp, to another location, or with overwrite='with-other-files', which deletes the other",
    )
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})
    ways: dict[str, dict[str, Any]] = {
        "layout": {"layout": "dcp", "overwrite": "keep-other-files"},
        "location": {"name": "d"},
        "delete": {"overwrite": "with-other-files"},
    }
    options = ways[follow]
    _in_job(lambda context, rank: save(context, rank, **options))
    assert same_value(ckptcore.load(tmp_path / options.get("name", "c")), {"w": np.arange(6.0)})
    assert (tmp_path / "c" / "notes.txt").exists() == (follow != "delete")


def test_loads_with_different_options(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})

    def load(context: Context, rank: int, *, differ: bool) -> Any:
        memory = MemoryOptions(load_bytes=100 + rank * differ)
        return ckptcore.load(tmp_path / "c", context=Context(job=context.job, memory=memory))

    text = _refused_in_job(
        lambda context, rank: load(context, rank, differ=True),
        "Pass the same Context(job=JobOptions(reads=...), memory=...)",
        'or load with reads="all"',
        error=ValueError,
        reads="broadcast",
    )
    assert str(tmp_path) in text
    loaded = _in_job(lambda context, rank: load(context, rank, differ=False), reads="broadcast")
    loaded += _in_job(lambda context, rank: load(context, rank, differ=True), reads="all")
    assert all(same_value(tree, {"w": ONE}) for tree in loaded)


def test_broadcast_loads_without_collectives(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})

    def load(context: Context, rank: int) -> Any:
        return ckptcore.load(tmp_path / "c", context=context)

    advice = 'or pass JobOptions(collectives=...), or use reads="all"'
    _refused_in_job(load, advice, error=PluginError, reads="broadcast", collectives=False)
    loaded = _in_job(load, reads="broadcast") + _in_job(load, reads="all", collectives=False)
    assert all(same_value(tree, {"w": ONE}) for tree in loaded)
