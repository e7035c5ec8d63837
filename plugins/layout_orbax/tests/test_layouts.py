"""Conformance tests of the layouts with different options, including saves that crash."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from ckptcore_orbax import ArrayRule, OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_orbax.zarr.dtypes import STORED_DTYPES
from ckptcore_testing import LayoutCrashTests, LayoutForecastTests, LayoutTests
from ckptcore_testing.layout_stores import local_directory
from ckptcore_testing.layout_trials import flat_trial, write_trial

from ckptcore.model import ArraySpec, Box
from ckptcore.protocols import Layout, StorageBackend
from plugins.layout_orbax.tests.foreign_arrays import KNOWN_DTYPES

UNKNOWN_DTYPES: Final = STORED_DTYPES[3].difference(KNOWN_DTYPES)
"""Dtypes that the installed tensorstore lacks. Layouts cannot compress them."""

_FEWER_CHUNKS: Final[Sequence[ArrayRule]] = (
    ArrayRule(pattern="large", chunk_bytes=400_000),
    ArrayRule(pattern="wide", chunk_bytes=400_000),
    ArrayRule(pattern="embed", chunk_bytes=10_000),
    ArrayRule(pattern="shared", chunk_bytes=10_000),
    ArrayRule(pattern="b/*", chunk_bytes=10_000),
)
"""Rules with larger chunks for the largest arrays of the tests, which would have very many chunks of 64 bytes."""


class _LayoutTests(LayoutTests):
    """Conformance tests. Long tests are marked as slow."""

    tampered_states = 300

    @pytest.mark.slow
    def test_a_truncated_object_is_an_error(self, storage: StorageBackend) -> None:
        super().test_a_truncated_object_is_an_error(storage)

    @pytest.mark.slow
    def test_a_corrupted_object_is_an_error(self, storage: StorageBackend) -> None:
        super().test_a_corrupted_object_is_an_error(storage)

    @pytest.mark.slow
    def test_inspect_of_damaged_files_raises_only_checkpoint_errors(self, storage: StorageBackend) -> None:
        super().test_inspect_of_damaged_files_raises_only_checkpoint_errors(storage)


class _OtherOptions(_LayoutTests):
    """Conformance tests of options that are similar to those of another class, so more tests are marked."""

    @pytest.mark.slow
    def test_a_hostile_state_is_an_error(self, storage: StorageBackend) -> None:
        super().test_a_hostile_state_is_an_error(storage)

    @pytest.mark.slow
    def test_damaged_metadata_files_raise_only_checkpoint_errors(self, storage: StorageBackend) -> None:
        super().test_damaged_metadata_files_raise_only_checkpoint_errors(storage)

    @pytest.mark.slow
    def test_arrays_can_cross_checksum_blocks(self, storage: StorageBackend) -> None:
        super().test_arrays_can_cross_checksum_blocks(storage)

    @pytest.mark.slow
    def test_any_boxes_of_any_tree_can_be_loaded(self, storage: StorageBackend) -> None:
        super().test_any_boxes_of_any_tree_can_be_loaded(storage)


class TestOcdbt(_LayoutTests):
    """The default options."""

    def layout(self) -> Layout:
        return OcdbtLayout()


@pytest.mark.slow
class TestOcdbtInPieces(_LayoutTests):
    """Several read chunks per write chunk, and several data files."""

    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, data_file_bytes=4096, rules=_FEWER_CHUNKS)


class TestOcdbtWithoutChecksums(_OtherOptions):
    """Read chunks without checksums. The tree has no subdirectory."""

    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, checksum=False, item="", rules=_FEWER_CHUNKS)


class TestOcdbtOfZarr2(_OtherOptions):
    """The format of version 0 of Orbax."""

    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, zarr_format=2, item="default", rules=_FEWER_CHUNKS)


class TestOcdbtCompressed(_LayoutTests):
    refused_dtypes = UNKNOWN_DTYPES

    def layout(self) -> Layout:
        return OcdbtLayout(compression="zstd", chunk_bytes=64, rules=_FEWER_CHUNKS)


class TestZarr3(_OtherOptions):
    ties = False

    def layout(self) -> Layout:
        return Zarr3Layout(chunk_bytes=64, rules=_FEWER_CHUNKS)


class TestZarr3Mixed(_LayoutTests):
    """Compressed and uncompressed arrays, with and without checksums."""

    ties = False
    refused_dtypes = UNKNOWN_DTYPES

    def layout(self) -> Layout:
        return Zarr3Layout(
            rules=[
                *_FEWER_CHUNKS,
                ArrayRule(pattern="*a*", compression="zstd:1"),
                ArrayRule(pattern="*i*", checksum=False),
            ]
        )


class TestZarr(_LayoutTests):
    ties = False

    def layout(self) -> Layout:
        return ZarrLayout(chunk_bytes=64, rules=_FEWER_CHUNKS)


class TestZarrCompressed(_OtherOptions):
    ties = False
    refused_dtypes = UNKNOWN_DTYPES

    def layout(self) -> Layout:
        return ZarrLayout(compression="blosc")


@pytest.mark.system
class TestOcdbtCrashes(LayoutCrashTests):
    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, data_file_bytes=256)


@pytest.mark.system
@pytest.mark.slow
class TestOcdbtCompressedCrashes(LayoutCrashTests):
    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, compression="zstd")


@pytest.mark.system
class TestZarr3Crashes(LayoutCrashTests):
    def layout(self) -> Layout:
        return Zarr3Layout()


@pytest.mark.system
@pytest.mark.slow
class TestZarrCrashes(LayoutCrashTests):
    def layout(self) -> Layout:
        return ZarrLayout()


@pytest.mark.parametrize("layout", [OcdbtLayout(chunk_bytes=64), Zarr3Layout(chunk_bytes=8), ZarrLayout(chunk_bytes=8)])
def test_read_chunks_beyond_the_edge_of_the_array(layout: Layout, tmp_path: Path) -> None:
    """The chunk at the edge is stored at full size, and a process writes several boxes of it."""
    boxes = [Box((0, 0, 0), (1, 1, 6)), Box((0, 1, 0), (1, 4, 6)), Box((1, 0, 0), (5, 4, 6))]
    trial = flat_trial({"odd": ArraySpec((5, 4, 6), "bool")}, parts={0: [boxes]})
    write_trial(layout, trial, local_directory(tmp_path)).assert_reads_back()


class TestOcdbtForecast(LayoutForecastTests):
    def layout(self) -> Layout:
        return OcdbtLayout(data_file_bytes=300_000)


class TestZarr3Forecast(LayoutForecastTests):
    """Compressed and uncompressed arrays."""

    def layout(self) -> Layout:
        return Zarr3Layout(chunk_bytes=65536, rules=[ArrayRule(pattern="shared", compression="zstd")])


class TestZarrForecast(LayoutForecastTests):
    def layout(self) -> Layout:
        return ZarrLayout(compression="blosc")


class TestCompressedOcdbtForecast(LayoutForecastTests):
    def layout(self) -> Layout:
        return OcdbtLayout(compression="zstd", data_file_bytes=100_000)
