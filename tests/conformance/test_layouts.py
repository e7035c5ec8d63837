"""The layouts of the core satisfy the protocol."""

from __future__ import annotations

import pytest
from ckptcore_testing import LayoutCrashTests, LayoutForecastTests, LayoutPiecesTests, LayoutTests

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.protocols import Layout, StorageBackend
from tests.composites.foreign_format import ShelfLayout


class TestSafetensors(LayoutTests):
    composites = False

    def layout(self) -> Layout:
        return SafetensorsLayout(standalone=True)  # without a root, `inspect` accepts only standalone files


class TestSafetensorsInSeveralFiles(TestSafetensors):
    def layout(self) -> Layout:
        return SafetensorsLayout(max_file_bytes=40, standalone=True)


class TestSafetensorsInPieces(LayoutPiecesTests):
    def layout(self) -> Layout:
        return SafetensorsLayout(max_file_bytes=400)


class TestSafetensorsForecast(LayoutForecastTests):
    def layout(self) -> Layout:
        return SafetensorsLayout()


class TestSafetensorsInSeveralFilesForecast(LayoutForecastTests):
    def layout(self) -> Layout:
        return SafetensorsLayout(max_file_bytes=100_000)


@pytest.mark.system
class TestSafetensorsCrashes(LayoutCrashTests):
    def layout(self) -> Layout:
        return SafetensorsLayout(max_file_bytes=100)


class TestShelf(LayoutTests):
    """A layout of the tests, which writes metadata files, and reads those of composites. Long tests are slow tests."""

    def layout(self) -> Layout:
        return ShelfLayout()

    @pytest.mark.slow
    def test_a_truncated_object_is_an_error(self, storage: StorageBackend) -> None:
        super().test_a_truncated_object_is_an_error(storage)

    @pytest.mark.slow
    def test_a_corrupted_object_is_an_error(self, storage: StorageBackend) -> None:
        super().test_a_corrupted_object_is_an_error(storage)

    @pytest.mark.slow
    def test_inspect_of_damaged_files_raises_only_checkpoint_errors(self, storage: StorageBackend) -> None:
        super().test_inspect_of_damaged_files_raises_only_checkpoint_errors(storage)
