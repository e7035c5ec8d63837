"""The layouts are what the protocol asks for, with every sort of option, and what a save that dies leaves of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from ckptcore_orbax import ArrayRule, OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing import LayoutCrashTests, LayoutForecastTests, LayoutTests
from ckptcore_testing.layout_stores import local_directory
from ckptcore_testing.layout_trials import flat_trial, write_trial

from ckptcore.model import ArraySpec, Box
from ckptcore.protocols import Layout, StorageBackend

_FEWER_CHUNKS: Final[Sequence[ArrayRule]] = (
    ArrayRule(pattern="large", chunk_bytes=400_000),
    ArrayRule(pattern="wide", chunk_bytes=400_000),
    ArrayRule(pattern="embed", chunk_bytes=10_000),
    ArrayRule(pattern="shared", chunk_bytes=10_000),
    ArrayRule(pattern="b/*", chunk_bytes=10_000),
)
"""The arrays of the tests that would fall into very many chunks of 64 bytes."""


class _LayoutTests(LayoutTests):
    """What takes long is marked so: other sets of options in this file meet the same code in every run."""

    tampered_states = 300

    @pytest.mark.slow
    def test_a_truncated_object_is_an_error(self, place: StorageBackend) -> None:
        super().test_a_truncated_object_is_an_error(place)

    @pytest.mark.slow
    def test_a_corrupted_object_is_an_error(self, place: StorageBackend) -> None:
        super().test_a_corrupted_object_is_an_error(place)

    @pytest.mark.slow
    def test_inspect_of_damaged_files_is_an_error_at_most(self, place: StorageBackend) -> None:
        super().test_inspect_of_damaged_files_is_an_error_at_most(place)


class _SystemSweeps(LayoutTests):
    """The damage of `LayoutTests`, which `make test-system` tries: with these options it takes seconds."""

    tampered_states = 300

    @pytest.mark.system
    def test_a_truncated_object_is_an_error(self, place: StorageBackend) -> None:
        super().test_a_truncated_object_is_an_error(place)

    @pytest.mark.system
    def test_a_corrupted_object_is_an_error(self, place: StorageBackend) -> None:
        super().test_a_corrupted_object_is_an_error(place)

    @pytest.mark.system
    def test_inspect_of_damaged_files_is_an_error_at_most(self, place: StorageBackend) -> None:
        super().test_inspect_of_damaged_files_is_an_error_at_most(place)


class _OtherOptions(_LayoutTests):
    """Sets of options that differ from those of another class here in one thing only."""

    @pytest.mark.system
    def test_a_hostile_state_is_an_error(self, place: StorageBackend) -> None:
        super().test_a_hostile_state_is_an_error(place)

    @pytest.mark.system
    def test_damaged_marks_are_an_error_at_most(self, place: StorageBackend) -> None:
        super().test_damaged_marks_are_an_error_at_most(place)

    @pytest.mark.slow
    def test_blocks_boundaries_do_not_show(self, place: StorageBackend) -> None:
        super().test_blocks_boundaries_do_not_show(place)

    @pytest.mark.slow
    def test_any_boxes_of_any_tree_come_back(self, place: StorageBackend) -> None:
        super().test_any_boxes_of_any_tree_come_back(place)


class TestOcdbt(_LayoutTests):
    """As a user gets it by name."""

    def layout(self) -> Layout:
        return OcdbtLayout()


class TestOcdbtInPieces(_SystemSweeps):
    """Read chunks within chunks, and several data files."""

    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, data_file_bytes=4096, rules=_FEWER_CHUNKS)


class TestOcdbtWithoutChecksums(_OtherOptions):
    """Read chunks that nothing stands behind, in a tree that has no directory of its own."""

    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, checksum=False, item="", rules=_FEWER_CHUNKS)


class TestOcdbtOfZarr2(_OtherOptions):
    """As version 0 of Orbax has it."""

    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, zarr_format=2, item="default", rules=_FEWER_CHUNKS)


class TestOcdbtCompressed(_LayoutTests):
    def layout(self) -> Layout:
        return OcdbtLayout(compression="zstd", chunk_bytes=64, rules=_FEWER_CHUNKS)


class TestZarr3(_OtherOptions):
    ties = False

    def layout(self) -> Layout:
        return Zarr3Layout(chunk_bytes=64, rules=_FEWER_CHUNKS)


class TestZarr3Mixed(_SystemSweeps):
    """Some arrays are compressed, others are not, and some of either have no checksums."""

    ties = False

    def layout(self) -> Layout:
        return Zarr3Layout(
            rules=[
                *_FEWER_CHUNKS,
                ArrayRule(pattern="*a*", compression="zstd:1"),
                ArrayRule(pattern="*i*", checksum=False),
            ]
        )

    @pytest.mark.slow
    def test_a_corrupted_object_is_an_error(self, place: StorageBackend) -> None:
        super().test_a_corrupted_object_is_an_error(place)

    @pytest.mark.slow
    def test_inspect_of_damaged_files_is_an_error_at_most(self, place: StorageBackend) -> None:
        super().test_inspect_of_damaged_files_is_an_error_at_most(place)


class TestZarr(_LayoutTests):
    ties = False

    def layout(self) -> Layout:
        return ZarrLayout(chunk_bytes=64, rules=_FEWER_CHUNKS)


class TestZarrCompressed(_OtherOptions):
    ties = False

    def layout(self) -> Layout:
        return ZarrLayout(compression="blosc")


@pytest.mark.system
class TestOcdbtDying(LayoutCrashTests):
    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, data_file_bytes=256)


@pytest.mark.system
class TestOcdbtCompressedDying(LayoutCrashTests):
    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, compression="zstd")


@pytest.mark.system
class TestZarr3Dying(LayoutCrashTests):
    def layout(self) -> Layout:
        return Zarr3Layout()


@pytest.mark.system
class TestZarrDying(LayoutCrashTests):
    def layout(self) -> Layout:
        return ZarrLayout()


@pytest.mark.parametrize("layout", [OcdbtLayout(chunk_bytes=64), Zarr3Layout(chunk_bytes=8), ZarrLayout(chunk_bytes=8)])
def test_read_chunks_that_lie_wholly_beyond_an_array(layout: Layout, tmp_path: Path) -> None:
    """A chunk at the edge is as large as any other, and what one process holds comes in several boxes."""
    boxes = [Box((0, 0, 0), (1, 1, 6)), Box((0, 1, 0), (1, 4, 6)), Box((1, 0, 0), (5, 4, 6))]
    trial = flat_trial({"odd": ArraySpec((5, 4, 6), "bool")}, parts={0: [boxes]})
    write_trial(layout, trial, local_directory(tmp_path)).assert_reads_back()


class TestOcdbtForetold(LayoutForecastTests):
    def layout(self) -> Layout:
        return OcdbtLayout(data_file_bytes=300_000)


class TestZarr3Foretold(LayoutForecastTests):
    """Some arrays compressed, and some not."""

    def layout(self) -> Layout:
        return Zarr3Layout(chunk_bytes=65536, rules=[ArrayRule(pattern="shared", compression="zstd")])


class TestZarrForetold(LayoutForecastTests):
    def layout(self) -> Layout:
        return ZarrLayout(compression="blosc")


class TestCompressedOcdbtForetold(LayoutForecastTests):
    def layout(self) -> Layout:
        return OcdbtLayout(compression="zstd", data_file_bytes=100_000)
