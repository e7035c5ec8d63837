"""Iterators of Grain: saved as files under a name, and as a state in a tree."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptcore_orbax import SavesToDirectoryAsyncHandler
from ckptcore_testing import FilesExample, FilesHandlerTests

import ckptcore
from ckptcore.handlers import GetStateHandler
from ckptcore.plugins import installed_plugins

grain = pytest.importorskip("grain")


def dataset_iterator() -> Iterator[Any]:
    dataset = grain.MapDataset.range(40).shuffle(seed=3).repeat().batch(3)
    made: Iterator[Any] = iter(dataset.to_iter_dataset())
    return made


def mixed_iterator() -> Iterator[Any]:
    """Return an iterator with nested states, whose steps buffer some elements."""
    parts = [grain.MapDataset.range(start, start + 20).to_iter_dataset() for start in (0, 100)]
    mixed = grain.IterDataset.mix(parts, weights=[0.3, 0.7])
    made: Iterator[Any] = iter(mixed.map(lambda number: number * 2).filter(lambda number: number % 3).batch(2))
    return made


def loader_iterator() -> Iterator[Any]:
    """Return an iterator whose state is bytes."""
    sampler = grain.samplers.IndexSampler(
        40, shuffle=True, seed=3, num_epochs=2, shard_options=grain.sharding.NoSharding()
    )
    made: Iterator[Any] = iter(grain.DataLoader(data_source=range(40), sampler=sampler, worker_count=0))
    return made


MAKERS: dict[str, Callable[[], Iterator[Any]]] = {
    "dataset": dataset_iterator,
    "mixed": mixed_iterator,
    "loader": loader_iterator,
}


def advanced(make: Callable[[], Iterator[Any]], steps: int) -> Iterator[Any]:
    made = make()
    for _ in range(steps):
        next(made)
    return made


def following(iterator: Iterator[Any]) -> list[str]:
    return [repr(element) for element in itertools.islice(iterator, 5)]


def _example(name: str) -> FilesExample:
    make = MAKERS[name]
    return FilesExample(
        name,
        lambda: advanced(make, 4),
        lambda: advanced(make, 1),
        next,
        lambda iterator: json.dumps(iterator.get_state(), default=bytes.decode),
    )


class TestIteratorsAsFiles(FilesHandlerTests):
    """Iterators saved by the coroutines that Grain provides for Orbax."""

    handler = SavesToDirectoryAsyncHandler()
    examples = tuple(_example(name) for name in MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_an_iterator_is_saved_as_files_under_a_name_and_as_a_state_in_a_tree(name: str) -> None:
    made = MAKERS[name]()
    assert type(installed_plugins().dispatch_named(made).files) is SavesToDirectoryAsyncHandler
    assert type(installed_plugins().dispatch(made).checkpointable) is GetStateHandler


@pytest.mark.parametrize("name", MAKERS)
def test_the_files_contain_the_position_at_the_call_of_the_save(name: str, tmp_path: Path) -> None:
    handler = SavesToDirectoryAsyncHandler()
    made = advanced(MAKERS[name], 4)
    rest = handler.save(made, tmp_path)
    expected = following(made)
    assert rest is not None
    rest()
    assert [path.name for path in tmp_path.iterdir()] == ["process_0-of-1.json"]
    target = advanced(MAKERS[name], 1)
    handler.load(target, tmp_path)
    assert following(target) == expected


@pytest.mark.parametrize("name", MAKERS)
def test_an_iterator_in_a_tree_resumes(name: str, tmp_path: Path) -> None:
    made = advanced(MAKERS[name], 4)
    handle = ckptcore.save_async(tmp_path / "step", {"data": made, "step": 4})
    expected = following(made)
    handle.result()
    target = {"data": MAKERS[name](), "step": 0}
    ckptcore.load_into(tmp_path / "step", target)
    assert target["step"] == 4
    assert following(target["data"]) == expected  # type: ignore[arg-type]  # the value is an iterator
