"""Training programs that are saved after one step, and resumed from every kind of file with every kind of request.

After a load, the steps of a program equal those of an uninterrupted run bit for bit. They reuse the memory of the
loaded state.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import ckptcore


class Program(NamedTuple):
    """A training program.

    Attributes:
        new: returns a new state for a seed.
        step: makes one step, and donates the arrays of the previous state.
        shape: returns the shapes of a new state.
        leaves: returns the arrays and numbers of a state.
        for_orbax: returns the tree of a state that Orbax can save.
        refused: the writers that cannot save a state of this program.
    """

    new: Callable[[int], Any]
    step: Callable[[Any], Any]
    shape: Callable[[], Any]
    leaves: Callable[[Any], list[Any]] = jax.tree.leaves
    for_orbax: Callable[[Any], Any] = lambda state: state
    refused: Collection[str] = ()


def _orbax_0(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _layout(name: str) -> Callable[[Path, Any], None]:
    def save(path: Path, tree: Any) -> None:
        ckptcore.save(path, tree, layout=name)

    return save


WRITERS: Final[dict[str, Callable[[Path, Any], None]]] = {
    **{name: _layout(name) for name in ("dcp", "ocdbt", "safetensors", "zarr", "zarr3")},
    "Orbax 0": _orbax_0,
    "Orbax 1": v1.save,
}

REQUESTS: Final[dict[str, Callable[[Program], Any]]] = {
    "new": lambda program: program.new(1),
    "jitted": lambda program: program.step(program.new(1)),
    "eval_shape": lambda program: program.shape(),
    "abstract": lambda program: ckptcore.abstract(program.new(1)),
    "abstract jitted": lambda program: ckptcore.abstract(program.step(program.new(1))),
}


def _load(path: Path, request: Any) -> Any:
    return ckptcore.load(path, {"state": request})["state"]


def _load_into(path: Path, request: Any) -> Any:
    target = {"state": request}
    ckptcore.load_into(path, target)
    return target["state"]


LOADS: Final[dict[str, Callable[[Path, Any], Any]]] = {"load": _load, "load_into": _load_into}


class Cell(NamedTuple):
    """A way to resume: the writer of the files, the request, and the function that loads."""

    writer: str
    request: str
    load: str


CELLS: Final = tuple(itertools.starmap(Cell, itertools.product(WRITERS, REQUESTS, LOADS)))

HALF: Final = tuple(
    Cell(writer, request, load)
    for (writer, request), load in zip(itertools.product(WRITERS, REQUESTS), itertools.cycle(LOADS), strict=False)
)
"""Half of the cells. They contain every pair of values, because the number of requests is odd."""


class Resumes(NamedTuple):
    """Data that all cells of a program share: the saved files, and the results of an uninterrupted run."""

    program: Program
    directory: Path
    saved: list[Any]
    continued: list[Any]
    bytes_held: int

    @classmethod
    def of(cls, program: Program, directory: Path) -> Resumes:
        """Run a program without an interruption, and record its results."""
        saved = program.step(program.new(0))
        numbers = _hosted(program.leaves(saved))
        state = program.step(saved)
        continued = _hosted(program.leaves(state))
        del saved, state
        held = _bytes_held(program, lambda: program.new(0))
        return cls(program, directory, numbers, continued, held)

    def path(self, writer: str) -> Path:
        """Return the location of the state after one step. The first call saves it."""
        path = self.directory / writer
        if not path.exists():
            state = self.program.step(self.program.new(0))
            WRITERS[writer](path, {"state": self.program.for_orbax(state) if "Orbax" in writer else state})
        return path


def assert_resumes(resumes: Resumes, cell: Cell) -> None:
    """Load as the cell says, continue, and compare with the uninterrupted run."""
    program, path = resumes.program, resumes.path(cell.writer)

    def loaded() -> Any:
        return LOADS[cell.load](path, REQUESTS[cell.request](program))

    state = loaded()
    _assert_equal(_hosted(program.leaves(state)), resumes.saved)
    if "jitted" in cell.request:
        assert _avals(program.leaves(state)) == _avals(program.leaves(program.step(program.new(0))))
    state = program.step(state)
    _assert_equal(_hosted(program.leaves(state)), resumes.continued, exact=True)
    del state
    _assert_donated(program.leaves(loaded()))
    assert _bytes_held(program, loaded) <= resumes.bytes_held * 1.01


def assert_all_resume(program: Program, directory: Path, subtests: pytest.Subtests, *, full: bool = True) -> None:
    """Try all cells of a program, or `HALF` if `full` is false."""
    resumes = Resumes.of(program, directory)
    for cell in CELLS if full else HALF:
        if cell.writer in program.refused:
            continue
        with subtests.test(msg=str(cell)):
            assert_resumes(resumes, cell)


def assert_some_resume(program: Program, directory: Path) -> None:
    """Try one cell for each writer. Together they contain every request and every function."""
    resumes = Resumes.of(program, directory)
    for cell in map(Cell, WRITERS, itertools.cycle(REQUESTS), itertools.cycle(LOADS)):
        if cell.writer not in program.refused:
            assert_resumes(resumes, cell)


def _assert_donated(leaves: list[Any]) -> None:
    """Assert that each buffer can be donated: a function with results of equal shapes allocates no memory."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.size and not _is_key(leaf)]
    before = _pointers(arrays)
    assert _pointers(_changed(arrays)) == before


def _pointers(arrays: list[Any]) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards}


@functools.partial(jax.jit, donate_argnums=0)
def _changed(arrays: list[Any]) -> list[Any]:
    return [~array if array.dtype == bool else -array for array in arrays]


def _bytes_held(program: Program, make: Callable[[], Any]) -> int:
    """Return how many more bytes of arrays exist after three steps than before."""
    gc.collect()
    before = _live_bytes()
    state = program.step(program.step(program.step(make())))
    jax.block_until_ready(program.leaves(state))  # type: ignore[no-untyped-call]
    gc.collect()
    return _live_bytes() - before


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())  # type: ignore[no-untyped-call]


def _is_key(leaf: jax.Array) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _hosted(leaves: list[Any]) -> list[np.ndarray[Any, Any]]:
    """Copy leaves to the host, so that donations do not change them."""
    return [np.array(_data(leaf) if isinstance(leaf, jax.Array) else leaf) for leaf in leaves]


def _avals(leaves: list[Any]) -> list[Any]:
    """Return the properties of leaves for which JAX compiles a function."""
    return [
        (leaf.aval, leaf.committed, leaf.sharding) if isinstance(leaf, jax.Array) else type(leaf) for leaf in leaves
    ]


def _assert_equal(actual: list[Any], expected: list[Any], *, exact: bool = False) -> None:
    """Assert equal values. If `exact` is set, also equal bytes and dtypes."""
    assert len(actual) == len(expected)
    for leaf, other in zip(actual, expected, strict=True):
        assert np.array_equal(leaf, other, equal_nan=leaf.dtype.kind in "fc")
        assert not exact or (leaf.dtype, leaf.tobytes()) == (other.dtype, other.tobytes())


def own(state: Any) -> Any:
    """Copy arrays that occur twice or that the program keeps, because JAX cannot donate them."""

    def copied(leaf: Any) -> Any:
        return jax.device_put(leaf, may_alias=False) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(copied, state)
