"""Remains of saves that crash or fail at any request, with each layout on every server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing import LayoutCrashTests, StorageSample

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.protocols import Layout
from tests.servers.samples import SERVERS


@pytest.mark.slow
class _OnServers(LayoutCrashTests):
    """Tests with every fault. They are slow."""

    def storages(self) -> Mapping[str, StorageSample]:
        """Return the servers."""
        return SERVERS


class TestSafetensors(_OnServers):
    def layout(self) -> Layout:
        return SafetensorsLayout(max_file_bytes=100)


class TestDcp(_OnServers):
    def layout(self) -> Layout:
        return DcpLayout()


class TestOcdbt(_OnServers):
    def layout(self) -> Layout:
        return OcdbtLayout(chunk_bytes=64, data_file_bytes=256)


class TestZarr3(_OnServers):
    def layout(self) -> Layout:
        return Zarr3Layout()


class TestZarr(_OnServers):
    def layout(self) -> Layout:
        return ZarrLayout()


@pytest.mark.system
class TestSample(LayoutCrashTests):
    """A sample with few faults, and with one layout for each server."""

    faults = 3

    @pytest.fixture(autouse=True)
    def _choose(self, storage: StorageSample) -> None:
        names = sorted(SERVERS)
        layouts = [DcpLayout, SafetensorsLayout, OcdbtLayout, Zarr3Layout]
        self._layout: Layout = layouts[[SERVERS[name] for name in names].index(storage) % len(layouts)]()

    def storages(self) -> Mapping[str, StorageSample]:
        """Return the servers."""
        return SERVERS

    def layout(self) -> Layout:
        """See `LayoutCrashTests`."""
        return self._layout

    @pytest.mark.slow
    def test_an_error_at_any_operation_leaves_the_old_or_the_new_checkpoint(self, trials: Iterator[Any]) -> None:
        super().test_an_error_at_any_operation_leaves_the_old_or_the_new_checkpoint(trials)

    @pytest.mark.slow
    def test_a_full_storage_leaves_the_old_checkpoint(self, trials: Iterator[Any]) -> None:
        super().test_a_full_storage_leaves_the_old_checkpoint(trials)
