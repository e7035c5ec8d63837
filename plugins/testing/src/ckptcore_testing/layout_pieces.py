"""Conformance tests of layouts that write arrays in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, Node, ValueRecord, WriteItem, WritePlan
from ckptcore.planning import boxes_of_range
from ckptcore.protocols import Layout
from ckptcore_testing.layout_stores import local_directory, objects_below
from ckptcore_testing.layout_trials import SAVE_ID, Trial, tree_trial, write_trial

_SPECS: Final = (
    ArraySpec((7, 5), "float32"),
    ArraySpec((3, 2, 9), "int64"),
    ArraySpec((), "float16"),
    ArraySpec((0, 4), "float32"),
    ArraySpec((101,), "uint8"),
    ArraySpec((7, 5), "float32"),
    ArraySpec((2, 40), "complex128"),
    ArraySpec((131, 73), "float32"),
)
_TIED: Final = {5: 0}


@dataclass(frozen=True)
class _CutTrial(Trial):
    """A trial that writes arrays in pieces. The objects are assigned to the processes in turn.

    Attributes:
        objects: the leaves in each object, from `Layout.arrays_by_object`.
        most_bytes: maximum size of a piece. A single element may exceed it.
    """

    objects: Sequence[Sequence[int]] = ()
    most_bytes: int = 1

    def plan(self, rank: int) -> WritePlan:
        """Return the plan of one process."""
        items: list[WriteItem] = []
        for leaf in (leaf for leaves in self.objects[rank :: self.size] for leaf in leaves):
            record = self.tree.leaves[leaf]
            assert isinstance(record, ArrayRecord)
            items.extend(WriteItem(leaf, record.spec, (box,)) for box in _pieces(record.spec, self.most_bytes))
        return WritePlan(self.tree, tuple(items), rank, self.size, SAVE_ID, self.name)


def _pieces(spec: ArraySpec, most_bytes: int) -> list[Box]:
    """Cut an array into boxes of at most `most_bytes`, each of which is a contiguous run of elements in C order."""
    if not spec.shape or spec.nbytes <= most_bytes:
        return [Box.whole(spec.shape)]
    step = max(1, most_bytes // spec.numpy_dtype.itemsize)
    ranges = [(start, min(start + step, spec.size)) for start in range(0, spec.size, step)]
    return [box for start, stop in ranges for box in boxes_of_range(spec.shape, start, stop)]


class LayoutPiecesTests:
    """Tests of a layout that writes arrays in pieces, in addition to `LayoutTests`. Subclass it and define `layout`."""

    def layout(self) -> Layout:
        """Return the layout, with options for small chunks and files, so that the test arrays need several of them."""
        raise NotImplementedError("define the method `layout`")

    def _arrays_by_object(self, trial: Trial) -> Sequence[Sequence[int]]:
        layout = self.layout()
        objects = layout.arrays_by_object(trial.tree)
        assert objects is not None, f"{layout.name} does not support pieces"
        return objects

    def _trial(self) -> Trial:
        leaves = (*_SPECS, ValueRecord("int", 1))
        skeleton = Node("dict", tuple(f"leaf {number}" for number in range(len(leaves))), (LEAF,) * len(leaves))
        return tree_trial(skeleton, leaves, aliases=_TIED)

    def test_every_array_belongs_to_one_object(self) -> None:
        objects = self._arrays_by_object(self._trial())
        assert objects == self._arrays_by_object(self._trial())
        expected = [leaf for leaf in range(len(_SPECS)) if leaf not in _TIED]
        assert sorted(leaf for leaves in objects for leaf in leaves) == expected

    @pytest.mark.parametrize("most_bytes", [16, 1000, 1 << 20])
    def test_writing_in_pieces_gives_the_same_files(self, most_bytes: int, tmp_path: Path) -> None:
        trial = self._trial()
        objects = self._arrays_by_object(trial)
        cut = _CutTrial(trial.tree, trial.arrays, trial.parts, objects=objects, most_bytes=most_bytes)
        whole, pieces = (
            write_trial(self.layout(), trial, local_directory(tmp_path / "a")),
            write_trial(self.layout(), cut, local_directory(tmp_path / "b")),
        )
        assert whole.state == pieces.state
        contents = [
            {key: stored.read_bytes() for key, stored in objects_below(local_directory(tmp_path / name)).items()}
            for name in ("a", "b")
        ]
        assert contents[0] == contents[1]

    @pytest.mark.parametrize("size", [2, 3, 20])
    def test_several_processes_write_the_objects(self, size: int, tmp_path: Path) -> None:
        trial = self._trial()
        objects = self._arrays_by_object(trial)
        cut = _CutTrial(trial.tree, trial.arrays, trial.parts, size=size, objects=objects, most_bytes=100)
        write_trial(self.layout(), cut, local_directory(tmp_path)).assert_reads_back()

    def test_a_tree_without_arrays_is_written_by_the_leader(self, tmp_path: Path) -> None:
        trial = tree_trial(Node("dict", ("a",), (LEAF,)), (ValueRecord("int", 1),))
        objects = self._arrays_by_object(trial)
        cut = _CutTrial(trial.tree, trial.arrays, trial.parts, size=2, objects=objects)
        assert write_trial(self.layout(), cut, local_directory(tmp_path)).read([]) == []
