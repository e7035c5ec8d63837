"""Conformance tests of leaf handlers."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import PLAIN_ARRAY, ArrayRecord, Box, HostArray, Pending, Shard, ValueRecord, sampled
from ckptcore.protocols import LeafHandler
from ckptcore_testing.arrays import assert_same_bits, dtype_name, same_bits
from ckptcore_testing.cases import check_each
from ckptcore_testing.coverage import assert_covers, assert_inside
from ckptcore_testing.host_memory import LateHostMemory
from ckptcore_testing.trees import assert_same_value

_STRANGE_KIND: Final = "stranger.kind"


@dataclasses.dataclass(frozen=True, slots=True)
class LeafExample:
    """A leaf for tests of a handler.

    Attributes:
        name: the name in test ids.
        make: creates a new leaf.
        expected: the elements as an array, or the value of a leaf that is stored in the root.
        elements: returns the elements or the value of a leaf, without the handler.
        abstracts: functions that create abstract leaves of the same shape, dtype and kind.
        mutate: changes every element of a leaf in place. None if the type is immutable.
    """

    name: str
    make: Callable[[], Any]
    expected: Any
    elements: Callable[[Any], Any]
    abstracts: Sequence[Callable[[], Any]] = ()
    mutate: Callable[[Any], None] | None = None


_KINDS: Final = frozenset({"example", "array_example", "value_example", "mutable_example"})


def _for_each(kind: str, **others: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a check into one test that runs it for every example of a kind, and raises all failures together.

    A handler can have a hundred examples, and each of the thirty checks takes about a millisecond. Separate tests would
    take longer to collect than to run. If the test is called with arguments, it runs the check once, with them.

    Args:
        kind: the name of the argument for the example.
        others: values of further arguments, by name. The check runs with each combination.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(self: LeafHandlerTests, *arguments: Any, **named: Any) -> None:
            if arguments or named:
                check(self, *arguments, **named)
                return
            examples = self._examples(kind)
            if not examples:
                pytest.skip(f"no {kind} among the examples")

            def check_one(example: LeafExample, *values: object) -> None:
                check(self, example, **dict(zip(others, values, strict=True)))

            check_each(check_one, examples, *others.values())

        # Do not use `functools.wraps`: pytest would then treat the arguments of the check as fixtures.
        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        return test

    return decorate


class LeafHandlerTests:
    """Conformance tests of a leaf handler. Subclass it and define `handler` and `examples`.

    Attributes:
        handler: the handler.
        examples: leaves of every kind that it supports.
        unsupported: functions that create leaves of a supported type that the handler must refuse.
    """

    handler: LeafHandler
    examples: Sequence[LeafExample] = ()
    unsupported: Sequence[Callable[[], Any]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise the tests of unsupported leaves, and the tests of a subclass that have an example argument."""
        for argument in _KINDS.intersection(metafunc.fixturenames):
            members = self._examples(argument)
            metafunc.parametrize(argument, members, ids=[example.name for example in members])
        if "refused" in metafunc.fixturenames:
            metafunc.parametrize("refused", list(self.unsupported))

    def _examples(self, kind: str) -> list[LeafExample]:
        """Return the examples for a test argument of this name."""
        if kind == "example":
            return list(self.examples)
        of_arrays = [isinstance(self.handler.describe(example.make()), ArrayRecord) for example in self.examples]
        return [
            example
            for example, is_array in zip(self.examples, of_arrays, strict=True)
            if is_array is (kind != "value_example") and (kind != "mutable_example" or example.mutate is not None)
        ]

    def _array_record(self, leaf: object) -> ArrayRecord:
        record = self.handler.describe(leaf)
        assert isinstance(record, ArrayRecord), f"an array is described by an ArrayRecord, found {record}"
        return record

    def _loaded(self, example: LeafExample, abstract: object, stored: ArrayRecord) -> list[tuple[Box, HostArray]]:
        """Return the boxes that a load passes to `build` in this process, in new memory."""
        boxes = self.handler.wanted(abstract, stored)
        return [(box, np.array(example.expected[box.slices], order="C", copy=True)) for box in boxes]

    # --- describe

    def test_there_are_examples(self) -> None:
        assert self.examples, "define the class attribute `examples` with at least one LeafExample"
        assert type(self.handler.priority) is int

    @_for_each("example")
    def test_describe_returns_the_record_of_the_leaf(self, example: LeafExample) -> None:
        leaf = example.make()
        record = self.handler.describe(leaf)
        assert record == self.handler.describe(leaf), "describe returns different records for one leaf"
        assert record.kind and type(record.kind) is str
        if isinstance(record, ArrayRecord):
            assert record.spec.shape == example.expected.shape
            assert all(type(extent) is int for extent in record.spec.shape), "extents are plain ints"
            assert record.spec.dtype == dtype_name(example.expected)
            notes = json.loads(json.dumps(dict(record.notes), allow_nan=False))
            assert notes == dict(record.notes), "notes must be the same after a trip through JSON"
        else:
            assert json.loads(json.dumps(record.value, allow_nan=False)) == record.value

    @_for_each("example")
    def test_describe_does_not_change_the_leaf(self, example: LeafExample) -> None:
        leaf = example.make()
        self.handler.describe(leaf)
        assert_same_value(example.elements(leaf), example.expected, "after describe")

    @_for_each("array_example")
    def test_an_abstract_leaf_has_the_record_of_its_leaf(self, array_example: LeafExample) -> None:
        record = self._array_record(array_example.make())
        for make_abstract in array_example.abstracts:
            of_abstract = self._array_record(make_abstract())
            assert (of_abstract.spec, of_abstract.kind) == (record.spec, record.kind)

    def test_unsupported_leaves_are_refused(self, refused: Callable[[], Any]) -> None:
        with pytest.raises(UnsupportedLeafError) as caught:
            self.handler.describe(refused())
        assert len(str(caught.value)) > 10, "the error must explain the reason and what to do"

    # --- abstract

    @_for_each("example")
    def test_abstract_returns_a_leaf_with_the_same_record(self, example: LeafExample) -> None:
        leaf = example.make()
        record, of_abstract = self.handler.describe(leaf), self.handler.describe(self.handler.abstract(leaf))
        if isinstance(record, ArrayRecord):
            assert isinstance(of_abstract, ArrayRecord), f"the abstract leaf of an array is described by {of_abstract}"
            assert (of_abstract.spec, of_abstract.kind) == (record.spec, record.kind)
        else:
            assert of_abstract == record, "a value is its own abstract leaf"
        assert_same_value(example.elements(leaf), example.expected, "after abstract")

    @_for_each("array_example")
    def test_abstract_returns_an_abstract_leaf_unchanged(self, array_example: LeafExample) -> None:
        abstract = self.handler.abstract(array_example.make())
        again = self.handler.abstract(abstract)
        assert type(again) is type(abstract)
        assert self.handler.describe(again) == self.handler.describe(abstract)

    @_for_each("array_example")
    def test_an_abstract_leaf_has_no_elements(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        abstract = self.handler.abstract(leaf)
        if abstract is leaf:
            assert array_example.mutate is None, "a mutable leaf cannot be its own abstract leaf"
            return
        if array_example.expected.size:
            with pytest.raises(UnsupportedLeafError):
                self.handler.shards(abstract, 0, 1)
        stored = self._array_record(leaf)
        zeros = [(box, np.zeros_like(elements)) for box, elements in self._loaded(array_example, abstract, stored)]
        for box, _ in zeros:
            assert self.handler.destination(abstract, stored, box) is None, "destination of an abstract leaf"
        assert self.handler.fill(abstract, stored, zeros) is False, "fill of an abstract leaf"
        assert self.handler.memory_to_fill(abstract) is None, "memory of an abstract leaf"
        assert_same_value(array_example.elements(leaf), array_example.expected, "the leaf of an abstract one")

    @_for_each("array_example")
    def test_an_abstract_leaf_does_not_reference_its_leaf(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        try:
            gone = weakref.ref(leaf)
        except TypeError:
            return  # the type does not support weak references
        abstract = self.handler.abstract(leaf)
        if abstract is leaf:
            return
        del leaf
        gc.collect()
        assert gone() is None or gone() is array_example.make(), (
            "an abstract leaf keeps the leaf, and its elements, alive"
        )

    @_for_each("array_example")
    def test_an_abstract_leaf_requests_the_same_boxes(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        stored = self._array_record(leaf)
        assert set(self.handler.wanted(self.handler.abstract(leaf), stored)) == set(self.handler.wanted(leaf, stored))

    @_for_each("array_example")
    def test_build_from_an_abstract_leaf_returns_an_equal_leaf(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        stored, abstract = self._array_record(leaf), self.handler.abstract(leaf)
        built = self.handler.build(abstract, stored, self._loaded(array_example, abstract, stored))
        like = self.handler.build(leaf, stored, self._loaded(array_example, leaf, stored))
        assert type(built) is type(leaf) and self.handler.built_type(built) == self.handler.built_type(leaf)
        assert self.handler.describe(built) == self.handler.describe(like), "shape, dtype, kind, cuts and notes"
        assert_same_value(array_example.elements(built), array_example.expected, "build of the abstract leaf")

    def test_abstract_refuses_unsupported_leaves(self, refused: Callable[[], Any]) -> None:
        with pytest.raises(UnsupportedLeafError):
            self.handler.abstract(refused())

    # --- to the host

    @_for_each("array_example", size=(1, 2, 3))
    def test_shards_of_all_processes_cover_the_array(self, array_example: LeafExample, size: int) -> None:
        leaf = array_example.make()
        shape = self._array_record(leaf).spec.shape
        owned: list[Box] = []
        seen: set[tuple[Box, int]] = set()
        for rank in range(size):
            for shard in self._shards(leaf, rank, size):
                assert_inside(shard.box, shape, "shards")
                assert 0 <= shard.replica < shard.replicas, f"{shard} has an invalid replica number"
                assert (shard.box, shard.replica) not in seen, f"{shard} is repeated in {size} processes"
                seen.add((shard.box, shard.replica))
                if shard.replica == 0:
                    owned.append(shard.box)
        assert_covers(owned, shape, f"replica 0 of the shards over {size} processes")

    @_for_each("array_example", size=(1, 2, 3))
    def test_the_number_of_replicas_matches_the_shards(self, array_example: LeafExample, size: int) -> None:
        leaf = array_example.make()
        replicas = self.handler.replicas(leaf, size)
        for rank in range(size):
            for shard in self._shards(leaf, rank, size):
                assert replicas in (shard.replicas, 1, None), f"{shard}, but replicas returns {replicas}"

    @_for_each("array_example", size=(1, 3))
    def test_a_dry_run_has_the_same_shards_as_a_save(self, array_example: LeafExample, size: int) -> None:
        leaf = array_example.make()
        for rank in range(size):
            shards = list(self._shards(leaf, rank, size))
            assert list(self.handler.shards_of(leaf, None, rank, size) or ()) == shards
            taken = self.handler.host_bytes(leaf, [shard.box for shard in shards])
            assert taken.viewed >= 0 and taken.copied >= 0

    @_for_each("array_example")
    def test_view_on_host_returns_the_elements(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        boxes = self._boxes(leaf)
        views = self.handler.view_on_host(leaf, boxes)
        self._assert_boxes(views, boxes, array_example.expected, "view_on_host")

    @_for_each("array_example")
    def test_a_sample_is_that_of_the_host_array(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        record = self._array_record(leaf)
        for box in self._boxes(leaf):
            parts = self.handler.sample(leaf, record, box)
            if parts is not None:  # too large to transfer it from a device
                expected = sampled(array_example.expected[box.slices])
                assert len(parts) == len(expected)
                for part, elements in zip(parts, expected, strict=True):
                    assert_same_bits(part.result(), elements, "sample")

    @_for_each("array_example")
    def test_copy_to_host_returns_the_elements(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        boxes = self._boxes(leaf)
        copies = self.handler.copy_to_host(leaf, boxes, LateHostMemory())
        self._assert_boxes(copies, boxes, array_example.expected, "copy_to_host")
        assert_same_value(array_example.elements(leaf), array_example.expected, "the leaf after copy_to_host")

    @_for_each("mutable_example")
    def test_a_copy_does_not_change_with_the_leaf(self, mutable_example: LeafExample) -> None:
        leaf = mutable_example.make()
        boxes = self._boxes(leaf)
        copies = self.handler.copy_to_host(leaf, boxes, LateHostMemory())
        for copy in copies:
            copy.result()
        assert mutable_example.mutate is not None
        mutable_example.mutate(leaf)
        changed = mutable_example.elements(leaf)
        if changed.size and same_bits(changed, mutable_example.expected):
            raise AssertionError(f"`mutate` of the example {mutable_example.name} does not change the elements")
        self._assert_boxes(copies, boxes, mutable_example.expected, "copy_to_host, after the leaf was changed")

    @_for_each("array_example")
    def test_a_copy_outlives_the_leaf(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        boxes = self._boxes(leaf)
        copies = self.handler.copy_to_host(leaf, boxes, LateHostMemory())
        for copy in copies:
            copy.result()
        del leaf
        gc.collect()
        reused = [array_example.make() for _ in range(3)]  # likely to reuse the memory, if it was freed
        for other in reused:
            if array_example.mutate is not None:
                array_example.mutate(other)
        self._assert_boxes(copies, boxes, array_example.expected, "copy_to_host, after the leaf was freed")

    @_for_each("array_example")
    def test_an_empty_list_of_boxes_gives_no_arrays(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        assert list(self.handler.view_on_host(leaf, ())) == []
        assert list(self.handler.copy_to_host(leaf, (), LateHostMemory())) == []

    def _shards(self, leaf: object, rank: int, size: int) -> Sequence[Shard]:
        shards = self.handler.shards(leaf, rank, size)
        assert shards is not None, "shards returned None, which means that only other processes have shards"
        return shards

    def _boxes(self, leaf: object) -> list[Box]:
        """Return the boxes of a job of one process, and halves of them: processes can share a replicated box."""
        boxes: list[Box] = []
        for shard in self._shards(leaf, 0, 1):
            boxes.append(shard.box)
            for axis, extent in enumerate(shard.box.shape):
                if extent > 1:
                    start = list(shard.box.start)
                    start[axis] += extent // 2
                    boxes.append(Box(tuple(start), shard.box.stop))
        return list(dict.fromkeys(boxes))

    def _assert_boxes(
        self, arrays: Sequence[Pending[HostArray]], boxes: Sequence[Box], expected: HostArray, where: str
    ) -> None:
        assert len(arrays) == len(boxes), f"{where}: one array for each box"
        for box, pending in zip(boxes, arrays, strict=True):
            array = pending.result()
            assert isinstance(array, np.ndarray), f"{where}: expected a NumPy array, found {type(array)}"
            assert_same_bits(array, expected[box.slices], f"{where} {box}")

    # --- from the host

    @_for_each("array_example")
    def test_requested_boxes_cover_the_array(self, array_example: LeafExample) -> None:
        stored = self._array_record(array_example.make())
        for abstract in self._abstracts(array_example):
            boxes = self.handler.wanted(abstract, stored)
            assert len(set(boxes)) == len(boxes), "wanted returns a box twice"
            assert_covers(boxes, stored.spec.shape, "wanted, in the only process", overlap=True)

    @_for_each("array_example")
    def test_build_restores_the_leaf(self, array_example: LeafExample) -> None:
        stored = self._array_record(array_example.make())
        for abstract in self._abstracts(array_example):
            built = self.handler.build(abstract, stored, self._loaded(array_example, abstract, stored))
            assert_same_value(array_example.elements(built), array_example.expected, "build")
            record = self._array_record(built)
            assert (record.spec, record.kind) == (stored.spec, stored.kind)

    @_for_each("array_example")
    def test_build_keeps_no_memory_that_it_disowns(self, array_example: LeafExample) -> None:
        stored = self._array_record(array_example.make())
        for abstract in self._abstracts(array_example):
            boxes = self._loaded(array_example, abstract, stored)
            built = self.handler.build(abstract, stored, boxes)
            if not self.handler.keeps_memory(abstract):
                for _, elements in boxes:
                    elements.view(np.uint8 if elements.ndim else elements.dtype)[...] = 0
            assert_same_value(array_example.elements(built), array_example.expected, "build, and then its memory freed")

    @_for_each("array_example")
    def test_build_returns_the_type_of_a_concrete_leaf(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        stored = self._array_record(leaf)
        built = self.handler.build(leaf, stored, self._loaded(array_example, leaf, stored))
        assert type(built) is type(leaf)
        assert_same_value(
            array_example.elements(leaf), array_example.expected, "the leaf that was used as an abstract leaf"
        )

    @_for_each("array_example")
    def test_build_treats_an_unknown_kind_as_a_plain_array(self, array_example: LeafExample) -> None:
        stored = self._array_record(array_example.make())
        if stored.kind != PLAIN_ARRAY:
            return
        strange = stored._replace(kind=_STRANGE_KIND, notes={"stranger": [1, "two", None]})
        for abstract in self._abstracts(array_example):
            built = self.handler.build(abstract, strange, self._loaded(array_example, abstract, strange))
            assert_same_value(array_example.elements(built), array_example.expected, "build of an unknown kind")

    @_for_each("value_example")
    def test_build_restores_a_value(self, value_example: LeafExample) -> None:
        leaf = value_example.make()
        stored = self.handler.describe(leaf)
        assert isinstance(stored, ValueRecord)
        through_json = ValueRecord(stored.kind, json.loads(json.dumps(stored.value, allow_nan=False)))
        for abstract in self._abstracts(value_example):
            built = self.handler.build(abstract, through_json, ())
            assert_same_value(value_example.elements(built), value_example.expected, "build")
            assert type(built) is type(leaf)

    def _abstracts(self, example: LeafExample) -> list[Any]:
        """Return the abstract leaves of an example, and a concrete leaf, which can be used in place of them."""
        return [*[make() for make in example.abstracts], example.make()]

    # --- into an existing leaf

    @_for_each("mutable_example")
    def test_destination_is_writable_memory(self, mutable_example: LeafExample) -> None:
        target = mutable_example.make()
        stored = self._array_record(target)
        for box in self.handler.wanted(target, stored):
            memory = self.handler.destination(target, stored, box)
            if memory is None:
                continue
            assert memory.shape == box.shape
            assert memory.dtype == stored.spec.numpy_dtype, "a destination has the stored dtype"
            assert memory.dtype.isnative, "a destination is in native byte order"
            assert memory.flags.c_contiguous, "a destination is C-contiguous"
            assert memory.flags.writeable, "a destination is writable"
            assert_same_bits(memory, mutable_example.expected[box.slices], "a destination is memory of the target")

    @_for_each("mutable_example")
    def test_destination_is_none_for_another_dtype(self, mutable_example: LeafExample) -> None:
        target = mutable_example.make()
        stored = self._array_record(target)
        other = "float64" if stored.spec.dtype != "float64" else "int32"
        changed = stored._replace(spec=stored.spec._replace(dtype=other))
        for box in self.handler.wanted(target, changed):
            assert self.handler.destination(target, changed, box) is None

    @_for_each("mutable_example")
    def test_fill_changes_the_leaf_itself(self, mutable_example: LeafExample) -> None:
        target = mutable_example.make()
        stored = self._array_record(target)
        loaded = self._loaded(mutable_example, target, stored)
        assert mutable_example.mutate is not None
        mutable_example.mutate(target)
        assert self.handler.fill(target, stored, loaded) is True, "a leaf that can be mutated can be filled"
        assert_same_value(mutable_example.elements(target), mutable_example.expected, "fill")

    @_for_each("mutable_example")
    def test_memory_of_fill_belongs_to_the_leaf(self, mutable_example: LeafExample) -> None:
        target, other = mutable_example.make(), mutable_example.make()
        memory = self.handler.memory_to_fill(target)
        assert memory is not None, "a leaf that can be filled has memory"
        again = self.handler.memory_to_fill(target)
        assert again is not None and list(memory) == list(again)
        assert not any(part.overlaps_itself() for part in memory)
        if other is not target:
            others = self.handler.memory_to_fill(other)
            assert others is not None
            assert not any(part.shares_bytes(other_part) for part in memory for other_part in others), (
                "two leaves have memory of their own"
            )
        nbytes = sum(math.prod(part.shape) * part.itemsize for part in memory)
        assert nbytes == sum(box.size for box in self.handler.wanted(target, self._array_record(target))) * (
            self._array_record(target).spec.numpy_dtype.itemsize
        )

    @_for_each("mutable_example")
    def test_fill_keeps_elements_that_were_read_into_a_destination(self, mutable_example: LeafExample) -> None:
        target = mutable_example.make()
        stored = self._array_record(target)
        loaded = self._loaded(mutable_example, target, stored)
        assert mutable_example.mutate is not None
        mutable_example.mutate(target)
        boxes: list[tuple[Box, HostArray]] = []
        for box, elements in loaded:
            memory = self.handler.destination(target, stored, box)
            if memory is not None:
                memory[...] = elements
            boxes.append((box, elements if memory is None else memory))
        assert self.handler.fill(target, stored, boxes) is True
        assert_same_value(mutable_example.elements(target), mutable_example.expected, "destination and fill")

    @_for_each("array_example")
    def test_fill_refuses_immutable_leaves(self, array_example: LeafExample) -> None:
        if array_example.mutate is not None:
            return
        target = array_example.make()
        stored = self._array_record(target)
        zeros = [(box, np.zeros_like(elements)) for box, elements in self._loaded(array_example, target, stored)]
        for box, _ in zeros:
            assert self.handler.destination(target, stored, box) is None
        assert self.handler.fill(target, stored, zeros) is False
        assert self.handler.memory_to_fill(target) is None, "memory of a leaf that cannot be changed"
        assert_same_value(array_example.elements(target), array_example.expected, "a leaf that cannot be changed")

    # --- ties

    @_for_each("example")
    def test_an_example_is_one_array_or_value(self, example: LeafExample) -> None:
        assert self.handler.parts_handler(example.make()) is None

    @_for_each("array_example")
    def test_identity_is_shared_only_by_tied_leaves(self, array_example: LeafExample) -> None:
        leaf = array_example.make()
        identity = self.handler.identity(leaf)
        assert identity == self.handler.identity(leaf)
        if identity is None:
            return
        hash(identity)
        other = array_example.make()
        if other is not leaf:
            assert identity != self.handler.identity(other), "two leaves with separate memory must not be tied"
