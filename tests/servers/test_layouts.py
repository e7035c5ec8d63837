"""Conformance tests of every layout on every server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing import LayoutTests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.protocols import Layout, StorageBackend
from tests.servers.samples import SERVERS, open_storage

_ANY_BOXES: Any = LayoutTests.test_any_boxes_of_any_tree_can_be_loaded


class _OnServers(LayoutTests):
    """Conformance tests with fewer examples and damages. The tests on a local file system have all of them."""

    tampered_states = 30
    most_damages = 3
    test_any_boxes_of_any_tree_can_be_loaded = settings(
        parent=settings.get_profile("ci"), suppress_health_check=list(HealthCheck)
    )(given(data=st.data())(_ANY_BOXES.hypothesis.inner_test))

    @pytest.fixture(params=list(SERVERS))
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageBackend]:
        """Return an empty directory on a server."""
        with SERVERS[request.param].open(tmp_path) as location:
            yield open_storage(location)


class TestSafetensors(_OnServers):
    composites = False

    def layout(self) -> Layout:
        return SafetensorsLayout(max_file_bytes=40, standalone=True)  # `inspect` without a root needs them


class TestDcp(_OnServers):
    def layout(self) -> Layout:
        return DcpLayout()


class TestOcdbt(_OnServers):
    def layout(self) -> Layout:
        return OcdbtLayout()


class _NamesAsTheyAre(_OnServers):
    """Layouts whose objects have the names of the leaves.

    GCS and moto refuse a line feed in a name (https://cloud.google.com/storage/docs/objects#naming), and
    fake-gcs-server lists control characters as U+FFFD.
    """

    refused_characters = "".join(map(chr, range(32)))


class TestZarr3(_NamesAsTheyAre):
    ties = False

    def layout(self) -> Layout:
        return Zarr3Layout()


class TestZarr(_NamesAsTheyAre):
    ties = False

    def layout(self) -> Layout:
        return ZarrLayout()
