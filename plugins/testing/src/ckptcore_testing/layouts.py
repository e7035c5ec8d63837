"""Conformance tests of layouts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import random
import tracemalloc
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.errors import (
    CheckpointError,
    ChecksumError,
    NameCollisionError,
    UnsupportedKeyError,
    UnsupportedLeafError,
)
from ckptcore.io.elements import little_dtype, plain
from ckptcore.model import JSON, LEAF, ArrayRecord, ArraySpec, Attribute, Box, Node, Skeleton, ValueRecord, format_path
from ckptcore.model.tree import Key
from ckptcore.planning import cuts_of, uncovered
from ckptcore.protocols import CheckpointInfo, Layout, StorageBackend
from ckptcore_testing import strategies
from ckptcore_testing.arrays import DTYPE_NAMES, PORTABLE_DTYPES, SHAPES, assert_same_bits, bit_patterns
from ckptcore_testing.cases import check_each
from ckptcore_testing.hostile_json import tampered
from ckptcore_testing.layout_stores import StrictReadStore, local_directory, objects_below
from ckptcore_testing.layout_trials import (
    Trial,
    WrittenTrial,
    flat_trial,
    tree_trial,
    write_metadata_files,
    write_sessions,
    write_trial,
)

_REFUSALS: Final = (UnsupportedLeafError, NameCollisionError, UnsupportedKeyError)
_EXAMPLE_BYTES: Final = 64 << 20
"""Memory limit of a read of the small test checkpoints, in bytes."""

_AWKWARD_TREES: Final[dict[str, tuple[tuple[Key, ...], ...]]] = {
    "dots": (("a.b",), ("a", "b")),
    "slashes": (("a/b",), ("a", "b")),
    "int and str": (("0",), (0,), ("x",)),
    "attribute and str": ((Attribute("x"),), ("x",)),
    "bool and str": ((True,), ("True",), (False, "a"), ("False", "a")),
    "tuple and str": ((("a", 1),), ("('a', 1)",), (("a", "1"),), ((("a.b", "c/d"),), "x"), (("\\", "'\""),), ((),)),
    "reserved": (("__metadata__",), ("x",)),
    "empty": (("",), ("a", "")),
    "empty above": (("", "a"), ("a", ""), ("b",)),
    "relative": ((".",), ("..", "..", "etc"), ("a", "..", "b")),
    "case": (("Weight",), ("weight",)),
    "unicode": (("é",), ("e\u0301",), ("\u0000",), ("\u202e",), ("😀",)),
    "escapes": (("a\\.b",), ("a.b",), ("a\\", "b"), ("a%2Eb",)),
    "long": (("k" * 300,), ("k" * 299, "k")),
    "negative": ((-1,), ("-1",)),
    "deep": ((*("level",) * 60,), ("level", "other")),
    "quotes": (('"',), ("'",)),
    "control characters": (("\n",), ("\t",)),
}

T = TypeVar("T")

_quiet = settings(deadline=None, suppress_health_check=list(HealthCheck))


class LayoutTests:
    """Conformance tests of a layout. Subclass it and define `layout`.

    Attributes:
        several_processes: True if several processes can write parts of one array.
        ties: True if tied arrays are stored once.
        foreign: True if `Layout.inspect` recognises the files of this layout without a root. For a dict of arrays with
            `PORTABLE_DTYPES`, it must then return the keys of the dict.
        composites: True if `Layout.inspect_composite` recognises several checkpointables of this layout.
        refused_dtypes: dtypes that `Layout.check` refuses. All others must be supported.
        tampered_states: approximate number of tampered states to test.
        refused_characters: characters that names of objects must not contain on `storage`. Tests do not use these
            characters in names of leaves. Needed only for layouts that name objects after leaves.
        most_damages: maximum number of damaged variants per object and test. None: all variants. Limit it for slow
            storages.
    """

    several_processes: bool = True
    ties: bool = True
    foreign: bool = True
    composites: bool = True
    refused_dtypes: Collection[str] = ()
    refused_characters: str = ""
    tampered_states: int = 1500
    most_damages: int | None = None

    def layout(self) -> Layout:
        """Return the layout, with options for small chunks and files, so that small arrays cross all boundaries."""
        raise NotImplementedError("define the method `layout`")

    @pytest.fixture(autouse=True)
    def stops_tracing(self) -> Iterator[None]:
        """Stop tracing memory after a test."""
        yield
        tracemalloc.stop()

    @pytest.fixture
    def storage(self, tmp_path: Path) -> StorageBackend:
        """Return an empty storage, by default a local directory."""
        return local_directory(tmp_path)

    def _some(self, damages: Sequence[T]) -> Sequence[T]:
        """Return at most `most_damages` of the values: the first one, and others at regular intervals."""
        if self.most_damages is None:
            return damages
        return damages[:: max(1, -(-len(damages) // self.most_damages))]

    # --- reading back

    def test_the_layout_has_a_name(self) -> None:
        name = self.layout().name
        assert type(name) is str and name

    def test_the_layout_can_be_pickled(self, storage: StorageBackend) -> None:
        """A pickled layout contains its options, but nothing that it has cached about checkpoints."""
        layout = self.layout()
        sent = len(pickle.dumps(layout))
        trial = flat_trial({f"array {number}": ArraySpec((3, 2), "float32") for number in range(100)})
        write_trial(layout, trial, Subdirectory(storage, "before")).assert_reads_back()
        there = pickle.loads(pickle.dumps(layout))
        assert type(there) is type(layout)
        assert len(pickle.dumps(layout)) <= sent + 100
        if dataclasses.is_dataclass(layout):
            assert there == layout
        write_trial(there, trial, Subdirectory(storage, "after")).assert_reads_back()

    def test_every_dtype_is_loaded_as_saved(self, storage: StorageBackend) -> None:
        check_each(lambda dtype: self._check_dtype(dtype, Subdirectory(storage, dtype)), DTYPE_NAMES)

    def _check_dtype(self, dtype: str, storage: StorageBackend) -> None:
        trial = flat_trial({f"array {number}": ArraySpec(shape, dtype) for number, shape in enumerate(SHAPES)})
        if dtype in self.refused_dtypes:
            assert dtype not in PORTABLE_DTYPES, f"every layout stores {dtype}"
            with pytest.raises(UnsupportedLeafError):
                self.layout().check(trial.tree, 1)
            return
        write_trial(self.layout(), trial, storage).assert_reads_back()

    def test_a_tree_can_be_a_single_leaf(self, storage: StorageBackend) -> None:
        write_trial(self.layout(), tree_trial(LEAF, [ArraySpec((3, 2), "float32")]), storage).assert_reads_back()

    def test_arrays_can_cross_checksum_blocks(self, storage: StorageBackend) -> None:
        """Some arrays are larger than the block of a checksum, and some start at odd offsets."""
        specs: dict[Key, ArraySpec] = {
            "odd": ArraySpec((7,), "uint8"),
            "large": ArraySpec((1031, 773), "float32"),
            "wide": ArraySpec((3, 200_001), "int16"),
            "last": ArraySpec((5,), "float64"),
        }
        written = write_trial(self.layout(), flat_trial(specs), storage)
        written.assert_reads_back()
        written.assert_reads_back([(1, Box((500, 3), (502, 770))), (2, Box((0, 199_999), (3, 200_001)))])

    def test_an_empty_tree_can_be_saved(self, storage: StorageBackend) -> None:
        for container in ("dict", "list"):
            trial = tree_trial(Node(container, (), ()), [])
            assert write_trial(self.layout(), trial, Subdirectory(storage, container)).read([]) == []

    def test_a_tree_without_arrays_can_be_saved(self, storage: StorageBackend) -> None:
        values = [ValueRecord("int", 1), ValueRecord("str", "two"), ValueRecord("none", None)]
        written = write_trial(self.layout(), tree_trial(Node("list", (0, 1, 2), (LEAF,) * 3), values), storage)
        assert written.read([]) == []

    def test_similar_names_are_not_confused(self, storage: StorageBackend) -> None:
        def check(name: str) -> None:
            self._check_names(_AWKWARD_TREES[name], Subdirectory(storage, name.replace(" ", "-")))

        check_each(check, _AWKWARD_TREES)

    def _check_names(self, paths: tuple[tuple[Key, ...], ...], storage: StorageBackend) -> None:
        paths = tuple([path for path in paths if not self._is_refused(path)])
        specs = [ArraySpec((number + 1,), "int32") for number in range(len(paths))]
        skeleton, order = _skeleton(paths)
        trial = tree_trial(skeleton, [specs[number] for number in order])
        try:
            self.layout().check(trial.tree, 1)
        except _REFUSALS:
            return  # a layout may refuse names before it writes anything
        write_trial(self.layout(), trial, storage).assert_reads_back()

    def test_shared_arrays_are_stored_once(self, storage: StorageBackend) -> None:
        """A format without tied arrays stores the bytes once per name."""
        specs = [ArraySpec((64, 1024), "float32")] * 3
        skeleton = Node("dict", ("embed", "head", "third"), (LEAF,) * 3)
        written = write_trial(self.layout(), tree_trial(skeleton, specs, aliases={1: 0, 2: 0}), storage)
        written.assert_reads_back()
        stored = sum(stored.nbytes for stored in written.objects().values())
        most = 2 if self.ties else 4
        assert stored < most * specs[0].nbytes, f"{stored} bytes were written for one array of {specs[0].nbytes}"

    @_quiet
    @given(data=st.data())
    def test_any_boxes_of_any_tree_can_be_loaded(self, storage: StorageBackend, data: st.DataObject) -> None:
        trial = data.draw(self._trials(), "trial")
        assume(not any(self._is_refused(path) for path in trial.tree.paths))
        try:
            self.layout().check(trial.tree, trial.size)
        except _REFUSALS:
            assume(False)
        with self._emptied(Subdirectory(storage, uuid.uuid4().hex)) as example:
            written = write_trial(self.layout(), trial, example)
            written.assert_reads_back()
            leaves = [leaf for leaf in trial.arrays if leaf not in trial.tree.aliases]
            wanted = []
            for leaf in data.draw(st.lists(st.sampled_from(leaves), max_size=5)) if leaves else []:
                wanted.append((leaf, data.draw(strategies.boxes(trial.arrays[leaf].shape, allow_empty=True))))
            written.assert_reads_back(list(dict.fromkeys(wanted)))

    @contextmanager
    def _emptied(self, storage: StorageBackend) -> Iterator[StorageBackend]:
        try:
            yield storage
        finally:
            storage.delete(list(storage.list()))

    def _is_refused(self, path: Sequence[Key]) -> bool:
        return any(character in str(key) for key in path for character in self.refused_characters)

    def _trials(self) -> st.SearchStrategy[Trial]:
        allowed = tuple([name for name in DTYPE_NAMES if name not in self.refused_dtypes])
        return _trials_of(self.several_processes, allowed)

    def test_several_processes_write_uneven_parts_of_one_array(self, storage: StorageBackend) -> None:
        if not self.several_processes:
            return
        boxes = [Box((0, 0), (3, 4)), Box((3, 0), (5, 4)), Box((0, 4), (4, 6)), Box((4, 4), (5, 6))]
        parts = {0: [[boxes[0]], [boxes[2], boxes[1]], [], [boxes[3]]]}
        trial = flat_trial(
            {"uneven": ArraySpec((5, 6), "bfloat16"), "whole": ArraySpec((3,), "int8")}, parts=parts, size=4
        )
        written = write_trial(self.layout(), trial, storage)
        written.assert_reads_back()
        written.assert_reads_back([(0, Box((2, 3), (5, 5))), (0, Box((0, 0), (1, 1))), (1, Box((1,), (2,)))])

    @pytest.mark.parametrize("cells", [(3, 1), (1, 4), (2, 3)], ids=["rows", "columns", "both"])
    def test_several_processes_share_the_write_of_a_replicated_array(
        self, cells: tuple[int, int], storage: StorageBackend
    ) -> None:
        """Each process writes different cells of a replicated array, which is stored only once."""
        layout = self.layout()
        if not layout.capabilities.any_replica_writes:
            return
        assert self.several_processes, (
            f"{layout.name} has the capability any_replica_writes, but does not write parts of arrays"
        )
        specs: dict[Key, ArraySpec] = {"shared": ArraySpec((96, 160), "float32"), "uneven": ArraySpec((7, 9), "int16")}
        cut = [_cut(spec, cells) for spec in specs.values()]
        boxes = [cells_of(record) for record in cut]
        parts = {leaf: [of_leaf[rank::3] for rank in range(3)] for leaf, of_leaf in enumerate(boxes)}
        trial = flat_trial(specs, parts=parts, size=3)
        written = write_trial(
            layout, dataclasses.replace(trial, tree=dataclasses.replace(trial.tree, leaves=tuple(cut))), storage
        )
        written.assert_reads_back()
        written.assert_reads_back([(0, Box((31, 39), (65, 121))), (1, Box((2, 2), (5, 8))), (0, boxes[0][-1])])
        stored = sum(stored.nbytes for stored in written.objects().values())
        assert stored < 2.5 * specs["shared"].nbytes, f"{stored} bytes were written for {specs['shared'].nbytes}"

    def test_several_sessions_write_one_checkpoint(self, storage: StorageBackend) -> None:
        """Each session knows only its own leaves: arrays, ties, values, a part of an array, or nothing."""
        layout = self.layout()
        if not layout.capabilities.sessions:
            return
        assert isinstance(layout.session_options, str)
        halves = [Box((0, 0), (3, 4)), Box((3, 0), (5, 4))]
        split = {"split": ArraySpec((5, 4), "bfloat16")} if self.several_processes else {}
        trials = [
            tree_trial(
                _nested({"a": {"z": LEAF, **dict.fromkeys(split, LEAF)}, "n": LEAF}),
                [ArraySpec((7,), "int16"), *split.values(), ValueRecord("int", 3)],
            ),
            tree_trial(_nested({}), []),
            tree_trial(
                _nested({"b": {"y": LEAF, "tied": LEAF}, "a": {"x": LEAF}}),
                [ArraySpec((300, 70), "float32"), ArraySpec((300, 70), "float32"), ArraySpec((), "int8")],
                aliases={1: 0},
            ),
            tree_trial(
                _nested({"a": {**dict.fromkeys(split, LEAF)}, "text": LEAF, "e": {"none": LEAF}}),
                [*split.values(), ValueRecord("str", "four"), ArraySpec((0, 3), "float64")],
            ),
        ]
        if split:
            cut = cuts_of((5, 4), halves)
            for number, leaf, box in ((0, 1, halves[0]), (3, 0, halves[1])):
                leaves = list(trials[number].tree.leaves)
                leaves[leaf] = ArrayRecord(split["split"], cuts=cut)
                tree = dataclasses.replace(trials[number].tree, leaves=tuple(leaves))
                arrays = {**trials[number].arrays, leaf: bit_patterns(split["split"], 9)}
                trials[number] = dataclasses.replace(trials[number], tree=tree, arrays=arrays, parts={leaf: [[box]]})
        written = write_sessions(layout, trials, storage)
        assert sorted(map(format_path, written.trial.tree.paths)) == sorted(
            ["a/x", "a/z", "b/tied", "b/y", "e/none", "n", "text", *(["a/split"] if split else [])]
        )
        written.assert_reads_back()
        dataclasses.replace(written, layout=type(layout)()).assert_reads_back()
        if self.foreign and not split:
            assert layout.inspect(written.stores()[0], None) is not None

    def test_a_hostile_receipt_of_a_session_is_an_error(self) -> None:
        layout = self.layout()
        if not layout.capabilities.sessions:
            return
        hostile: list[JSON] = [
            None,
            [],
            "state",
            {},
            {"leaf": [7]},
            {"leaf": ["x"], "digested_leaf": []},
            {"leaf": None},
        ]
        for state in hostile:
            with pytest.raises((KeyError, IndexError, TypeError, ValueError)):
                layout.renumbered(state, [0, 1])

    def test_two_checkpoints_do_not_mix(self, storage: StorageBackend) -> None:
        layout = self.layout()
        first = write_trial(layout, flat_trial({"x": ArraySpec((5,), "float32")}), Subdirectory(storage, "first"))
        second = write_trial(layout, flat_trial({"y": ArraySpec((6,), "int8")}), Subdirectory(storage, "second"))
        first.assert_reads_back()
        second.assert_reads_back()

    def test_names_in_keys_are_those_that_some_file_systems_take_for_one(self, storage: StorageBackend) -> None:
        """Some file systems treat names that differ only in case as equal. The core refuses such names before it writes
        anything, so `names_in_keys` must return all of them."""
        layout = self.layout()
        trial = flat_trial({name: ArraySpec((5,), "float32") for name in ("W", "w", "other")})
        written = write_trial(layout, trial, storage)
        names = list(layout.names_in_keys(trial.plan(0)))
        assert all(any(key == name or key.startswith(f"{name}/") for key in written.digests) for name in names)
        folds: dict[str, str] = {}
        for key in written.digests:
            if folds.setdefault(key.lower(), key) != key:
                below = [name for name in names if key == name or key.startswith(f"{name}/")]
                assert below, f"{key} and {folds[key.lower()]} differ in case only: names_in_keys must have their names"

    def test_names_of_their_own_do_not_collide_with_others(self, storage: StorageBackend) -> None:
        """Two saves in one directory have only the name of the index in common, so that a rename of the index replaces
        one save by the other."""
        layout = self.layout()
        assert layout.index_name is None
        first, second = layout.with_own_names("aa"), layout.with_own_names("bb")
        if first is None or second is None:
            pytest.skip("the files of this layout have fixed names")
        assert first.index_name is not None
        for number, trial in enumerate([_small_trial(), tree_trial(LEAF, [ValueRecord("int", 1)])]):
            stores = [Subdirectory(storage, f"{kind}-{number}") for kind in ("plain", "first", "second")]
            layouts = [layout, first, pickle.loads(pickle.dumps(second))]
            written = [write_trial(variant, trial, store) for variant, store in zip(layouts, stores, strict=True)]
            plain, old, new = [set(result.digests) - {first.index_name} for result in written]
            assert not old & new and first.index_name in written[1].digests
            assert {key.replace(".aa", "") for key in old} == plain
            dataclasses.replace(written[1], layout=self.layout()).assert_reads_back()

    def test_a_new_layout_object_reads_the_checkpoint(self, storage: StorageBackend) -> None:
        """The stored state contains the options that a read needs, so a layout with default options can read."""
        written = write_trial(self.layout(), _small_trial(), storage)
        dataclasses.replace(written, layout=type(self.layout())()).assert_reads_back()

    def test_the_state_can_be_pickled(self, storage: StorageBackend) -> None:
        state = write_trial(self.layout(), _small_trial(), storage).state
        assert pickle.loads(pickle.dumps(state)) == state

    # --- positions of chunks

    def test_extents_match_the_bytes_of_leaves(self, storage: StorageBackend) -> None:
        written = write_trial(self.layout(), _small_trial(), storage)
        objects = written.objects()
        for leaf, key, start, stop in _extents(written, written.state):
            content = objects[key].read_bytes()
            assert 0 <= start <= stop <= len(content)
            if start == stop:
                continue
            changed = bytearray(content)
            changed[start] ^= 0xFF
            objects[key].write_bytes(changed)
            differing = [number for number in written.trial.arrays if not _comes_back(written, number)]
            objects[key].write_bytes(content)
            assert differing == [leaf], f"byte {start} of {key} is said to be of leaf {leaf}"

    def test_the_chunk_index_covers_every_array(self, storage: StorageBackend) -> None:
        written = write_trial(self.layout(), _small_trial(), storage)
        index = written.layout.index(written.trial.tree, written.state)
        for leaf in written.trial.arrays:
            if leaf in written.trial.tree.aliases:
                continue
            record = written.trial.tree.leaves[leaf]
            assert isinstance(record, ArrayRecord)
            tiles = list(index.boxes(leaf, Box.whole(record.spec.shape)))
            boxes = [tile.box.intersect(Box.whole(record.spec.shape)) for tile in tiles]
            if tiles:
                assert uncovered(record.spec, [box for box in boxes if box is not None]) is None
            assert len({tile.is_plain for tile in tiles}) <= 1
            for tile in tiles:
                if tile.is_exact:
                    assert tile.is_plain
                    part = written.trial.arrays[leaf][tile.box.slices]
                    assert storage.get(tile.key, tile.offset, tile.offset + part.nbytes) == (
                        plain(part).astype(little_dtype(part.dtype)).tobytes()
                    )

    # --- damaged and hostile checkpoints

    def test_a_hostile_state_is_an_error(self, storage: StorageBackend) -> None:
        """A read with a tampered state raises no error but `CheckpointError`. It may return wrong elements."""
        written = write_trial(self.layout(), _small_trial(), storage)
        for state in tampered(written.state, self.tampered_states):
            with _BoundedMemory(f"reading with the state {state!r:.500}"):
                for store in written.stores():
                    _only_checkpoint_errors(
                        partial(written.read, state=state, store=store), f"the state {state!r:.500}"
                    )
                _only_checkpoint_errors(
                    partial(_describe_all, written, state),
                    f"extents of the state {state!r:.500}",
                )

    def test_a_truncated_object_is_an_error(self, storage: StorageBackend) -> None:
        written = write_trial(self.layout(), _small_trial(), storage)
        for key, stored in written.objects().items():
            content = stored.read_bytes()
            for length in self._some(_lengths(len(content))):
                stored.write_bytes(content[:length])
                where = f"{key} cut to {length} of {len(content)} bytes"
                with _BoundedMemory(where):
                    _error_or_right(written, where)
                    _only_checkpoint_errors(partial(_read_unverified, written), where)
            stored.unlink()
            _error_or_right(written, f"{key} removed")
            _only_checkpoint_errors(partial(_read_unverified, written), f"{key} removed")
            stored.write_bytes(content)

    def test_a_corrupted_object_is_an_error(self, storage: StorageBackend) -> None:
        written = write_trial(self.layout(), _small_trial(), storage)
        choices = random.Random(1)
        for key, stored in written.objects().items():
            content = stored.read_bytes()
            for _ in self._some(range(60)):
                if not content:
                    break
                changed = bytearray(content)
                for _ in range(choices.choice((1, 1, 4))):
                    changed[choices.randrange(len(changed))] = choices.randrange(256)
                stored.write_bytes(changed)
                with _BoundedMemory(f"reading a corrupted {key}"):
                    _error_or_right(written, f"{key} corrupted")
                    _only_checkpoint_errors(partial(_read_unverified, written), f"{key} corrupted")
            stored.write_bytes(content)

    # --- checkpoints of other software

    def test_inspect_recognises_its_own_checkpoint(self, storage: StorageBackend) -> None:
        if not self.foreign:
            assert self.layout().inspect(StrictReadStore(storage), None) is None
            return
        specs: dict[Key, ArraySpec] = {f"array_{name}": ArraySpec((3, 2), name) for name in PORTABLE_DTYPES}
        specs["scalar"] = ArraySpec((), "float32")
        specs["none"] = ArraySpec((0, 4), "float32")
        written = write_trial(self.layout(), flat_trial(specs), storage)
        inspection = self.layout().inspect(StrictReadStore(storage), None)
        assert inspection is not None, "inspect does not recognise the written checkpoint"
        assert inspection.writer and json.loads(json.dumps(inspection.state, allow_nan=False)) == inspection.state
        composite = self.layout().inspect_composite(StrictReadStore(storage))
        keys, members = list(written.objects()), () if composite is None else tuple(composite.members)
        others = sorted({*keys} - {*self.layout().own_keys(keys, members)})
        assert not others, f"own_keys leaves out files of the layout, which a save would refuse to replace: {others}"
        names = [str(path[-1]) for path in inspection.tree.paths]
        assert sorted(names) == sorted(map(str, specs)), "inspect returns other names than were written"
        arrays = dict(zip(specs, written.trial.arrays.values(), strict=True))
        for name, elements in zip(
            names, written.read(tree=inspection.tree, state=inspection.state, verified=False), strict=True
        ):
            assert_same_bits(elements, arrays[name], name)

    def test_inspect_returns_none_for_other_files(self, storage: StorageBackend) -> None:
        layout = self.layout()
        assert layout.inspect(StrictReadStore(storage), None) is None, "an empty directory"
        assert layout.inspect(StrictReadStore(Subdirectory(storage, "missing")), None) is None, "no directory"
        storage.put("notes.txt", b"nothing to see here")
        storage.put("sub/data.bin", bytes(range(256)))
        assert layout.inspect(StrictReadStore(storage), None) is None, "files of another format"
        assert layout.inspect(StrictReadStore(storage), "notes.txt") is None, "a file of another format"

    def test_inspect_of_damaged_files_raises_only_checkpoint_errors(self, storage: StorageBackend) -> None:
        written = write_trial(self.layout(), _small_trial(), storage)
        choices = random.Random(2)
        for key, stored in written.objects().items():
            content = stored.read_bytes()
            for bad in self._some(_damaged(content, choices)):
                stored.write_bytes(bad)
                for entry in (None, key if "/" not in key else None):
                    with _BoundedMemory(f"inspecting a damaged {key}"):
                        _only_checkpoint_errors(
                            partial(self._inspect_and_read, written, entry), f"{key} is {bad[:200]!r}"
                        )
            stored.write_bytes(content)

    # --- checkpoints of several checkpointables

    def test_several_checkpointables_are_found_by_name(self, storage: StorageBackend) -> None:
        """Each checkpointable and the list of names can be inspected."""
        layout = self.layout()
        written = self._write_several(layout, storage)
        for member in written.values():
            member.assert_reads_back()
        if not self.foreign:
            return
        for name, member in written.items():
            inspection = layout.inspect(StrictReadStore(Subdirectory(storage, name)), None)
            assert inspection is not None, f"inspect does not recognise {name} in its directory"
            assert len(inspection.tree.leaves) == len(member.trial.arrays)
            member.assert_reads_back()
        if self.composites:
            several = layout.inspect_composite(StrictReadStore(storage))
            assert several is not None, "inspect_composite does not recognise the written checkpoint"
            assert {name: several.members[name] for name in written} == dict.fromkeys(written, "tree")
            assert several.writer
            assert several.default is None or several.default in several.members

    def test_a_single_tree_has_at_most_one_name(self, storage: StorageBackend) -> None:
        layout = self.layout()
        write_trial(layout, _small_trial(), storage)
        composite = layout.inspect_composite(StrictReadStore(storage))
        if composite is not None:
            assert len(composite.members) == 1, f"one tree has the names {list(composite.members)}"
            (name,) = composite.members
            assert layout.inspect(StrictReadStore(Subdirectory(storage, name)), None) is not None, (
                f"inspect does not recognise {name}"
            )

    def test_other_files_are_not_a_composite(self, storage: StorageBackend) -> None:
        layout = self.layout()
        assert layout.inspect_composite(StrictReadStore(storage)) is None, "an empty directory"
        assert layout.inspect_composite(StrictReadStore(Subdirectory(storage, "missing"))) is None, "no directory"
        storage.put("notes.txt", b"nothing to see here")
        storage.put("sub/data.bin", bytes(range(256)))
        assert layout.inspect_composite(StrictReadStore(storage)) is None, "files of no format"

    def test_damaged_metadata_files_raise_only_checkpoint_errors(self, storage: StorageBackend) -> None:
        layout = self.layout()
        written = self._write_several(layout, storage)
        choices = random.Random(3)
        for key, stored in objects_below(storage).items():
            if key.partition("/")[0] in written:
                continue
            content = stored.read_bytes()
            for bad in self._some(_damaged(content, choices)):
                stored.write_bytes(bad)
                with _BoundedMemory(f"inspecting a damaged {key}"):
                    _only_checkpoint_errors(partial(_inspect_both, layout, storage), f"{key} is {bad[:200]!r}")
            stored.unlink()
            _only_checkpoint_errors(partial(_inspect_both, layout, storage), f"{key} removed")
            stored.write_bytes(content)

    def _write_several(self, layout: Layout, storage: StorageBackend) -> dict[str, WrittenTrial]:
        """Write two named trees to directories of these names, and the metadata files of a checkpoint of both."""
        written = {}
        for name in ("params", "moments"):
            trial = dataclasses.replace(_small_trial(), name=name)
            written[name] = write_trial(layout, trial, Subdirectory(storage, name))
        info = CheckpointInfo(
            "2026-01-02T03:04:05.678+00:00", {"run": "baseline"}, {"loss": 0.5}, dict.fromkeys(written, "tree")
        )
        write_metadata_files(layout, info, storage)
        return written

    def _inspect_and_read(self, written: WrittenTrial, entry: str | None) -> object:
        inspection = self.layout().inspect(StrictReadStore(written.storage), entry)
        if inspection is None:
            return None
        file_bytes = sum(stored.nbytes for stored in objects_below(written.storage).values())
        if inspection.tree.nbytes > 16 * file_bytes + 4096:
            return None  # the arrays are much larger than the files, and would need too much memory
        return written.read(tree=inspection.tree, state=inspection.state, verified=False)


@st.composite
def _trials_of(draw: st.DrawFn, several: bool, dtypes: tuple[str, ...]) -> Trial:
    size = draw(st.integers(1, 3)) if several else 1
    specs = draw(st.lists(strategies.specs(dtypes), max_size=5))
    parts: dict[int, list[list[Box]]] = {}
    for number, spec in enumerate(specs):
        ranks: list[list[Box]] = [[] for _ in range(size)]
        boxes = draw(strategies.partitions(spec.shape)) if several else (Box.whole(spec.shape),)
        for box in boxes:
            ranks[draw(st.integers(0, size - 1))].append(box)
        parts[number] = ranks
    names = draw(st.lists(strategies.keys(), min_size=len(specs), max_size=len(specs), unique=True))
    aliases = {}
    tied = draw(st.integers(-1, len(specs) - 1))
    if tied >= 0:
        aliases[len(specs)] = tied
        specs.append(specs[tied])
        names.append("tied to another")
    skeleton = Node("dict", tuple(names), (LEAF,) * len(names))
    return tree_trial(skeleton, specs, aliases=aliases, parts=parts, size=size)


def _small_trial() -> Trial:
    return flat_trial(
        {
            "weight": ArraySpec((5, 4), "float32"),
            "bias": ArraySpec((4,), "bfloat16"),
            "step": ArraySpec((), "int64"),
            "mask": ArraySpec((9,), "bool"),
        }
    )


def _nested(children: Mapping[Key, Skeleton | Mapping[Key, Skeleton]]) -> Node:
    """Return a dict of leaves and dicts of leaves."""
    made = [
        child if not isinstance(child, Mapping) else Node("dict", tuple(child), tuple(child.values()))
        for child in children.values()
    ]
    return Node("dict", tuple(children), tuple(made))


def _skeleton(paths: tuple[tuple[Key, ...], ...]) -> tuple[Skeleton, list[int]]:
    """Return a tree of dicts with these paths, and the numbers of the paths in the order of its leaves."""
    order: list[int] = []

    def build(members: list[tuple[tuple[Key, ...], int]]) -> Skeleton:
        if len(members) == 1 and not members[0][0]:
            order.append(members[0][1])
            return LEAF
        children: dict[Key, list[tuple[tuple[Key, ...], int]]] = {}
        for path, number in members:
            children.setdefault(path[0], []).append((path[1:], number))
        return Node("dict", tuple(children), tuple([build(below) for below in children.values()]))

    return build([(path, number) for number, path in enumerate(paths)]), order


def _read_unverified(written: WrittenTrial) -> None:
    for store in written.stores(verified=False):
        written.read(verified=False, store=store)


def cells_of(record: ArrayRecord) -> Sequence[Box]:
    """Return the boxes between the cuts of an array, in C order."""
    axes = record.cuts or ((),) * len(record.spec.shape)
    ranges = [
        list(itertools.pairwise([0, *boundaries, extent]))
        for boundaries, extent in zip(axes, record.spec.shape, strict=True)
    ]
    return [
        Box(tuple([low for low, _ in cell]), tuple([high for _, high in cell])) for cell in itertools.product(*ranges)
    ]


def _cut(spec: ArraySpec, cells: Sequence[int]) -> ArrayRecord:
    """Divide an array into a grid of cells. The last cell along each axis can be smaller."""
    steps = [-(-extent // count) for extent, count in zip(spec.shape, cells, strict=True)]
    cuts = tuple([tuple(range(step, extent, step)) for step, extent in zip(steps, spec.shape, strict=True)])
    return ArrayRecord(spec, cuts=cuts)


def _comes_back(written: WrittenTrial, leaf: int) -> bool:
    """Return True if a leaf is read back unchanged. False if it differs, or if a checksum in the file fails."""
    array = written.trial.arrays[leaf]
    try:
        (elements,) = written.read([(leaf, Box.whole(array.shape))], verified=False)
    except ChecksumError:
        return False
    return elements.tobytes() == array.tobytes()


def _extents(written: WrittenTrial, state: JSON) -> Iterator[tuple[int, str, int, int]]:
    """Return all extents (leaf, object, start, stop) of a state."""
    tree = written.trial.tree
    index = written.layout.index(tree, state)
    for leaf in written.trial.arrays:
        if leaf not in tree.aliases:
            for key, start, stop in index.extents(leaf):
                yield leaf, key, start, stop


def _describe_all(written: WrittenTrial, state: JSON) -> None:
    """Call all methods of an index that do not read."""
    tree = written.trial.tree
    index = written.layout.index(tree, state)
    for leaf in written.trial.arrays:
        if leaf not in tree.aliases:
            index.check([leaf])
            index.chunk_rows(leaf)
            list(index.extents(leaf))
            list(index.boxes(leaf, Box.whole(written.trial.arrays[leaf].shape)))


def _lengths(length: int) -> list[int]:
    """Return lengths to which an object of this length is truncated."""
    if length <= 64:
        return list(range(length))
    return sorted({0, 1, 7, 8, 9, *range(10, length, max(1, length // 40)), length - 1})


def _damaged(content: bytes, choices: random.Random) -> list[bytes]:
    """Return damaged variants of a file."""
    damaged = [content[:length] for length in _lengths(len(content))]
    damaged += [b"\0" * len(content), b"\xff" * 64, b"{}", b"[" * 100_000, b"null", bytes(range(256)) * 4]
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(3):
            if changed:
                changed[choices.randrange(min(len(changed), 2048))] = choices.randrange(256)
        damaged.append(bytes(changed))
    return damaged


def _inspect_both(layout: Layout, storage: StorageBackend) -> None:
    layout.inspect(StrictReadStore(storage), None)
    layout.inspect_composite(StrictReadStore(storage))


def _only_checkpoint_errors(action: Callable[[], Any], where: str) -> None:
    try:
        action()
    except CheckpointError:
        pass
    except Exception as error:
        raise AssertionError(f"{where}: expected a CheckpointError, found {type(error).__name__}: {error}") from error


def _error_or_right(written: WrittenTrial, where: str) -> None:
    for store in written.stores():
        _only_checkpoint_errors(partial(written.assert_reads_back, stores=(store,)), where)


class _BoundedMemory:
    """Fails if the peak of allocated memory reaches `_EXAMPLE_BYTES`, far more than a correct read needs.

    The end of the context does not stop the tracing, because in Python 3.11 that crashes a C++ thread that allocates at
    the same time. The fixture `stops_tracing` stops it once per test.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        if not tracemalloc.is_tracing():
            tracemalloc.start(1)
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]

    def __exit__(self, *_: object) -> None:
        peak = tracemalloc.get_traced_memory()[1] - self._before
        assert peak < _EXAMPLE_BYTES, f"{self._where} used {peak} bytes of memory"
