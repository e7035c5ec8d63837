"""The layouts, as the protocol asks of every layout."""

from __future__ import annotations

from ckptcore_dcp.layouts import DcpLayout

from ckptcore.protocols import Layout
from ckptcore.testing import LayoutForecastTests, LayoutTests


class TestDcp(LayoutTests):
    def layout(self) -> Layout:
        return DcpLayout()


class TestDcpForetold(LayoutForecastTests):
    def layout(self) -> Layout:
        return DcpLayout()
