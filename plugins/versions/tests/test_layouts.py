"""Conformance tests of the layout `deltas`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptcore_testing import LayoutChainTests, LayoutTests
from ckptcore_versions.layout import DeltaLayout

import ckptcore
from ckptcore.protocols import Layout
from plugins.versions.tests.held import HeldState, version_at


class TestFullVersions(LayoutTests):
    foreign = False
    composites = False
    tampered_states = 100
    most_damages = 4

    def layout(self) -> Layout:
        return DeltaLayout()


class TestDeltas(LayoutChainTests):
    def save(self, location: str, state: Mapping[str, Any], base: tuple[str, Mapping[str, Any]]) -> None:
        held = HeldState(version_at(base[0]), base[1])
        context = ckptcore.Context(durability="none")
        ckptcore.save(location, state, layout=DeltaLayout().against(held), context=context)
