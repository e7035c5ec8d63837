"""Each conformance class fails for implementations that break its protocol."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from ckptcore_testing import (
    ContainerExample,
    ContainerHandlerTests,
    CoordinatorTests,
    FrameworkSample,
    LayoutTests,
    LeafExample,
    LeafHandlerTests,
    SaveLoadMatrixTests,
    ThreadJob,
    assert_same_value,
    bit_patterns,
)
from ckptcore_testing.builtin_samples import FILE, NUMPY
from ckptcore_testing.layout_stores import WatchedIndex, local_directory
from ckptcore_testing.samples import LayoutSample

from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.errors import PluginError
from ckptcore.model import (
    JSON,
    AbstractArray,
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    LeafRecord,
    Pending,
    ReadItem,
    Ready,
    Receipt,
    Shard,
    TreeMetadata,
)
from ckptcore.protocols import (
    CheckpointInfo,
    ChunkIndex,
    ContainerHandler,
    Coordinator,
    Flattened,
    HostMemory,
    InspectedComposite,
    Inspection,
    Layout,
    ReadStore,
    Snapshot,
    WriteStore,
)
from tests.composites.foreign_format import ShelfLayout

T = TypeVar("T")
SPEC = ArraySpec((5, 3), "float32")


def _zero(array: HostArray) -> None:
    array[...] = 0


EXAMPLE = LeafExample(
    "array", lambda: bit_patterns(SPEC), bit_patterns(SPEC), np.asarray, (lambda: np.zeros((5, 3), np.float32),), _zero
)
FROZEN = dataclasses.replace(EXAMPLE, mutate=None)


class CopiesNothing(HostArrayHandler):
    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        return self.view_on_host(leaf, boxes)


class ForgetsARow(HostArrayHandler):
    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        return (Shard(Box((1, 0), (5, 3)), rank, size),)


class OwnsEverywhere(HostArrayHandler):
    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        return (Shard(Box.whole(leaf.shape)),)


class GoesThroughFloat64(HostArrayHandler):
    """A handler that turns signalling NaNs into quiet ones."""

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        with np.errstate(all="ignore"):
            return [Ready(leaf[box.slices].astype(np.float64).astype(np.float32)) for box in boxes]


class TiesEverything(HostArrayHandler):
    def identity(self, leaf: Any) -> Hashable | None:
        return "the same"


class WantsTooLittle(HostArrayHandler):
    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        return (Box((0, 0), (4, 3)),)


class BuildsTransposed(HostArrayHandler):
    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        return boxes[0][1][::-1]


class FillsNothing(HostArrayHandler):
    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        return True


class GivesAnotherDestination(HostArrayHandler):
    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        return np.zeros(box.shape, stored.spec.numpy_dtype)


class NotesNoJSON(HostArrayHandler):
    def describe(self, leaf: Any) -> LeafRecord:
        return ArrayRecord(ArraySpec(leaf.shape, "float32"), notes={"shape": leaf.shape})


class DescribesAbstractOtherwise(HostArrayHandler):
    def describe(self, leaf: Any) -> LeafRecord:
        return ArrayRecord(
            ArraySpec(leaf.shape, "float32"), "array" if leaf.flags.writeable and leaf[0, 0] != 0 else "other"
        )


class IsItsOwnAbstract(HostArrayHandler):
    def abstract(self, leaf: Any) -> object:
        return leaf


class AbstractsAnotherDtype(HostArrayHandler):
    def abstract(self, leaf: Any) -> object:
        return AbstractArray(leaf.shape, "float64")


class AbstractsTheAbstract(HostArrayHandler):
    def abstract(self, leaf: Any) -> object:
        return leaf.shape if isinstance(leaf, AbstractArray) else super().abstract(leaf)

    def describe(self, leaf: Any) -> LeafRecord:
        return ArrayRecord(ArraySpec(leaf if isinstance(leaf, tuple) else leaf.shape, "float32"))


class RemembersTheLeaf(HostArrayHandler):
    def __init__(self) -> None:
        self.leaves: list[object] = []

    def abstract(self, leaf: Any) -> object:
        self.leaves.append(leaf)
        return super().abstract(leaf)


class SavesAbstractLeaves(HostArrayHandler):
    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        return (Shard(Box.whole(leaf.shape), rank, size),)


class WantsLessForAnAbstract(HostArrayHandler):
    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        return super().wanted(abstract, stored) if isinstance(abstract, np.ndarray) else (Box((0, 0), (1, 1)),)


class BuildsAnotherTypeForAnAbstract(HostArrayHandler):
    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        built = super().build(abstract, stored, boxes)
        return built if isinstance(abstract, np.ndarray) else np.asarray(built).view(np.matrix)


LEAF_FAULTS: Sequence[tuple[type[HostArrayHandler], str, dict[str, Any]]] = (
    (CopiesNothing, "test_a_copy_does_not_change_with_the_leaf", {"mutable_example": EXAMPLE}),
    (ForgetsARow, "test_shards_of_all_processes_cover_the_array", {"array_example": EXAMPLE, "size": 1}),
    (OwnsEverywhere, "test_shards_of_all_processes_cover_the_array", {"array_example": EXAMPLE, "size": 2}),
    (GoesThroughFloat64, "test_view_on_host_returns_the_elements", {"array_example": EXAMPLE}),
    (TiesEverything, "test_identity_is_shared_only_by_tied_leaves", {"array_example": EXAMPLE}),
    (WantsTooLittle, "test_requested_boxes_cover_the_array", {"array_example": EXAMPLE}),
    (BuildsTransposed, "test_build_restores_the_leaf", {"array_example": EXAMPLE}),
    (FillsNothing, "test_fill_changes_the_leaf_itself", {"mutable_example": EXAMPLE}),
    (FillsNothing, "test_fill_refuses_immutable_leaves", {"array_example": FROZEN}),
    (GivesAnotherDestination, "test_destination_is_writable_memory", {"mutable_example": EXAMPLE}),
    (GivesAnotherDestination, "test_destination_is_none_for_another_dtype", {"mutable_example": EXAMPLE}),
    (NotesNoJSON, "test_describe_returns_the_record_of_the_leaf", {"example": EXAMPLE}),
    (IsItsOwnAbstract, "test_an_abstract_leaf_has_no_elements", {"array_example": EXAMPLE}),
    (SavesAbstractLeaves, "test_an_abstract_leaf_has_no_elements", {"array_example": EXAMPLE}),
    (AbstractsAnotherDtype, "test_abstract_returns_a_leaf_with_the_same_record", {"example": EXAMPLE}),
    (AbstractsTheAbstract, "test_abstract_returns_an_abstract_leaf_unchanged", {"array_example": EXAMPLE}),
    (RemembersTheLeaf, "test_an_abstract_leaf_does_not_reference_its_leaf", {"array_example": EXAMPLE}),
    (WantsLessForAnAbstract, "test_an_abstract_leaf_requests_the_same_boxes", {"array_example": EXAMPLE}),
    (
        BuildsAnotherTypeForAnAbstract,
        "test_build_from_an_abstract_leaf_returns_an_equal_leaf",
        {"array_example": EXAMPLE},
    ),
    (DescribesAbstractOtherwise, "test_an_abstract_leaf_has_the_record_of_its_leaf", {"array_example": EXAMPLE}),
)


@pytest.mark.parametrize(("handler", "test", "arguments"), LEAF_FAULTS)
def test_broken_leaf_handler_is_detected(handler: type[HostArrayHandler], test: str, arguments: dict[str, Any]) -> None:
    suite = type("Suite", (LeafHandlerTests,), {"handler": handler(), "examples": (EXAMPLE,)})()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(suite, test)(**arguments)
    whole = type("Suite", (LeafHandlerTests,), {"handler": HostArrayHandler(), "examples": (EXAMPLE,)})()
    if arguments.get("array_example") is not FROZEN:
        getattr(whole, test)(**arguments)


def test_a_leaf_that_is_not_refused_is_detected() -> None:
    suite = type("Suite", (LeafHandlerTests,), {"handler": HostArrayHandler()})()
    with pytest.raises(pytest.fail.Exception):
        suite.test_unsupported_leaves_are_refused(lambda: np.zeros(3))
    with pytest.raises(pytest.fail.Exception):
        suite.test_abstract_refuses_unsupported_leaves(lambda: np.zeros(3))


# --- containers


class SwapsChildren(ContainerHandler):
    priority = 1

    def flatten(self, value: dict[str, Any]) -> Flattened:
        return Flattened("dict", tuple(value), tuple(value.values()))

    def unflatten(self, like: dict[str, Any], children: Sequence[object]) -> object:
        return dict(zip(like, reversed(children), strict=True))


class ChangesLike(SwapsChildren):
    def unflatten(self, like: dict[str, Any], children: Sequence[object]) -> object:
        like.update(zip(like, children, strict=True))
        return dict(like)


class RepeatsKeys(SwapsChildren):
    def flatten(self, value: dict[str, Any]) -> Flattened:
        return Flattened("dict", ("a",) * len(value), tuple(value.values()))


class CopiesChildren(SwapsChildren):
    def flatten(self, value: dict[str, Any]) -> Flattened:
        return Flattened("dict", tuple(value), tuple(map(np.copy, value.values())))


@pytest.mark.parametrize(
    ("handler", "test"),
    [
        (SwapsChildren, "test_unflatten_is_the_inverse_of_flatten"),
        (SwapsChildren, "test_unflatten_accepts_other_children"),
        (ChangesLike, "test_unflatten_accepts_other_children"),
        (RepeatsKeys, "test_flatten_returns_every_child_under_a_unique_key"),
        (CopiesChildren, "test_flatten_returns_every_child_under_a_unique_key"),
    ],
)
def test_a_broken_container_handler_is_detected(handler: type[SwapsChildren], test: str) -> None:
    suite = type("Suite", (ContainerHandlerTests,), {"handler": handler()})()
    example = ContainerExample("dict", lambda: {"a": np.ones(1), "b": np.ones(2)}, lambda made: list(made.values()))
    with pytest.raises(AssertionError):
        getattr(suite, test)(example)


# --- layouts


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapped(Layout):
    """A layout that forwards to the safetensors layout. Each subclass below breaks one rule."""

    inner: SafetensorsLayout = dataclasses.field(default_factory=lambda: SafetensorsLayout(standalone=True))
    name: str = "safetensors"

    def check(self, tree: TreeMetadata, size: int) -> None:
        self.inner.check(tree, size)

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        return self.inner.write(snapshot, store)

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        return self.inner.finish(tree, receipts, store)

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        return WatchedIndex(self.inner.index(tree, state), self.read)

    def read(
        self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
    ) -> Iterator[int]:
        yield from store.read_boxes(index, items, buffers)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        return self.inner.inspect(store, entry)


class YieldsTwice(Wrapped):
    def read(
        self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
    ) -> Iterator[int]:
        for number in store.read_boxes(index, items, buffers):
            yield number
            yield number


class YieldsNothing(Wrapped):
    def read(
        self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
    ) -> Iterator[int]:
        for _ in store.read_boxes(index, items, buffers):
            pass
        yield from ()


class YieldsEarly(Wrapped):
    def read(
        self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
    ) -> Iterator[int]:
        yield from range(len(buffers))
        for _ in store.read_boxes(index, items, buffers):
            pass


class TrustsItsState(Wrapped):
    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        _ = state["files"]  # type: ignore[index,call-overload]  # it does not check the state, which is its fault
        return self.inner.index(tree, state)


class AllocatesWhatItIsTold(Wrapped):
    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        offsets = state.get("offset") if isinstance(state, dict) else None
        if isinstance(offsets, list) and offsets and isinstance(offsets[0], int) and 0 < offsets[0] < 1 << 40:
            np.zeros(min(offsets[0], 1 << 29), np.uint8)
        return self.inner.index(tree, state)


class NamesOtherBytes(Wrapped):
    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        return OtherExtents(self.inner.index(tree, state), self.read)


class OtherExtents(WatchedIndex):
    def extents(self, leaf: int) -> Iterator[tuple[str, int, int]]:
        for key, start, stop in self.inner.extents(leaf):
            yield key, start - 4, stop - 4


class FindsEverything(Wrapped):
    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        return self.inner.inspect(store, entry) or Inspection(TreeMetadata.from_json(_EMPTY), None, "anyone")


class FindsNothing(Wrapped):
    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        return None


_EMPTY: JSON = {
    "skeleton": ["dict", [], 0], "count": 0, "dtypes": [], "dtype": [], "shape": [], "values": [], "extras": {},
    "aliases": [],
}  # fmt: skip


class KeepsMemory(Wrapped):
    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        return self.inner.write(_Unreleased(snapshot), store)


class _Unreleased:
    def __init__(self, snapshot: Snapshot) -> None:
        self.plan = snapshot.plan
        self.take = snapshot.take

    def release(self, item: int) -> None:
        """Do nothing, although the memory should be released."""


class RoundsElements(Wrapped):
    def read(
        self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
    ) -> Iterator[int]:
        for number in store.read_boxes(index, items, buffers):
            if buffers[number].dtype == np.float32 and buffers[number].size:
                buffers[number].view(np.uint32)[...] &= np.uint32(0xFFFFFFFE)
            yield number


@pytest.mark.parametrize(
    ("layout", "test"),
    [
        (YieldsTwice, "test_every_dtype_is_loaded_as_saved"),
        (YieldsNothing, "test_every_dtype_is_loaded_as_saved"),
        (YieldsEarly, "test_every_dtype_is_loaded_as_saved"),
        (RoundsElements, "test_every_dtype_is_loaded_as_saved"),
        (KeepsMemory, "test_every_dtype_is_loaded_as_saved"),
        (TrustsItsState, "test_a_hostile_state_is_an_error"),
        (AllocatesWhatItIsTold, "test_a_hostile_state_is_an_error"),
        (NamesOtherBytes, "test_extents_match_the_bytes_of_leaves"),
        (FindsEverything, "test_inspect_returns_none_for_other_files"),
        (FindsNothing, "test_inspect_recognises_its_own_checkpoint"),
    ],
)
def test_a_broken_layout_is_detected(layout: type[Wrapped], test: str, tmp_path: Path) -> None:
    for name in ("broken", "whole"):
        (tmp_path / name).mkdir()
    suite = type("Suite", (LayoutTests,), {"several_processes": False, "layout": lambda self: layout()})()
    with pytest.raises(AssertionError):
        getattr(suite, test)(local_directory(tmp_path / "broken"))
    whole = type("Suite", (LayoutTests,), {"several_processes": False, "layout": lambda self: Wrapped()})()
    getattr(whole, test)(local_directory(tmp_path / "whole"))


class MarksAMember(ShelfLayout):
    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        super().write_metadata_files(info, store)
        for name in info.members:
            store.put(f"{name}/done", b"")


class MarksAsTheCore(ShelfLayout):
    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        super().write_metadata_files(info, store)
        store.put("checkpoint.done", b"")


class MarksTheIndexAgain(ShelfLayout):
    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        super().write_metadata_files(info, store)
        store.put("tree/index.shelf", b"")


class MarksNothing(ShelfLayout):
    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        """Write no file, although the layout should mark the checkpoint."""


class FindsNoNames(ShelfLayout):
    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        return None


class FindsNamesEverywhere(ShelfLayout):
    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        return InspectedComposite({}, "anyone")


class NamesEveryDirectory(ShelfLayout):
    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        inspected = super().inspect_composite(store)
        return inspected and InspectedComposite({**inspected.members, "other": "tree"}, "anyone")


class TrustsItsMarks(ShelfLayout):
    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        return InspectedComposite({}, json.loads(store.get("SHELF"))["writer"])


@pytest.mark.parametrize(
    ("layout", "test"),
    [
        (MarksAMember, "test_several_checkpointables_are_found_by_name"),
        (MarksAsTheCore, "test_a_tree_can_be_a_single_leaf"),
        (MarksTheIndexAgain, "test_a_tree_can_be_a_single_leaf"),
        (MarksNothing, "test_inspect_recognises_its_own_checkpoint"),
        (MarksNothing, "test_several_checkpointables_are_found_by_name"),
        (FindsNoNames, "test_several_checkpointables_are_found_by_name"),
        (FindsNamesEverywhere, "test_other_files_are_not_a_composite"),
        (NamesEveryDirectory, "test_a_single_tree_has_at_most_one_name"),
        (TrustsItsMarks, "test_damaged_metadata_files_raise_only_checkpoint_errors"),
    ],
)
def test_a_layout_that_breaks_composites_is_detected(layout: type[ShelfLayout], test: str, tmp_path: Path) -> None:
    for name in ("broken", "whole"):
        (tmp_path / name).mkdir()
    suite = type("Suite", (LayoutTests,), {"layout": lambda self: layout()})()
    with pytest.raises(AssertionError):
        getattr(suite, test)(local_directory(tmp_path / "broken"))
    getattr(type("Suite", (LayoutTests,), {"layout": lambda self: ShelfLayout()})(), test)(
        local_directory(tmp_path / "whole")
    )


# --- coordinators


class Unordered(CoordinatorTests):
    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        thread_job = ThreadJob(size, timeout_seconds=timeout_seconds)

        class Backwards:
            def __init__(self, inner: Coordinator) -> None:
                self.inner = inner
                self.rank, self.size = inner.rank, inner.size
                self.broadcast = inner.broadcast

            def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
                gathered = self.inner.gather(key, payload)
                return None if gathered is None else gathered[::-1]

        return thread_job.run(lambda coordinator: job(Backwards(coordinator)))


def test_a_coordinator_that_mixes_ranks_is_detected() -> None:
    with pytest.raises(AssertionError):
        Unordered().test_gather_returns_payloads_in_order_of_rank(3)


# --- the matrix


class TestOneCell(SaveLoadMatrixTests):
    """A matrix of fewer objects."""

    def frameworks(self) -> dict[str, FrameworkSample]:
        return {"numpy": NUMPY}

    def layouts(self) -> dict[str, LayoutSample]:
        return {"safetensors": LayoutSample(name="safetensors")}


def test_a_framework_that_loses_bits_is_detected(tmp_path: Path) -> None:
    def rounded(leaf: Any) -> HostArray:
        array = np.array(leaf)
        return array if array.dtype != np.int32 else array & ~1

    lossy = dataclasses.replace(NUMPY, elements=rounded)
    layout = LayoutSample(name="safetensors")
    with pytest.raises(AssertionError, match="int32"):
        TestOneCell().test_any_framework_loads_checkpoints_of_another(NUMPY, lossy, layout, FILE, tmp_path)


def test_two_samples_with_the_same_name_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from ckptcore_testing.samples import SAMPLE_GROUP, installed_samples

    def doubled(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [
            importlib.metadata.EntryPoint("one", "ckptcore_testing.builtin_samples:NUMPY", group),
            importlib.metadata.EntryPoint("two", "tests.conformance.test_kit_notices:IMPOSTOR", group),
        ]

    monkeypatch.setattr(importlib.metadata, "entry_points", doubled)
    with pytest.raises(PluginError, match="'numpy'"):
        installed_samples()
    assert SAMPLE_GROUP == "ckptcore_testing"


IMPOSTOR = dataclasses.replace(NUMPY, fills=False)


class _Described:
    """An abstract array like `jax.ShapeDtypeStruct`, which NumPy converts to an array of one object."""

    dtype = np.dtype(np.float32)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Described) and self.shape == other.shape

    def __hash__(self) -> int:
        return hash(self.shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.float64("nan"),
        lambda: np.complex128(complex(1, float("nan"))),
        lambda: np.float32(-0.0),
        lambda: _Described((2, 3)),
        lambda: AbstractArray((2, 3), "float32"),
    ],
)
def test_values_with_a_dtype_are_compared_by_their_content(make: Callable[[], Any]) -> None:
    assert_same_value(make(), make(), "value")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (np.float32(0.0), np.float32(-0.0)),
        (np.float64(0.0), np.float64(-0.0)),
        (_Described((2, 3)), _Described((3, 2))),
    ],
)
def test_other_values_with_a_dtype_differ(actual: Any, expected: Any) -> None:
    with pytest.raises(AssertionError, match="value: expected"):
        assert_same_value(actual, expected, "value")


def test_nans_of_numpy_with_other_bits_are_equal() -> None:
    assert_same_value(-np.float64("nan"), np.float64("nan"), "value")
