"""Conformance tests of the layouts."""

from __future__ import annotations

from ckptcore_dcp.layouts import DcpLayout
from ckptcore_testing import LayoutForecastTests, LayoutTests

from ckptcore.protocols import Layout


class TestDcp(LayoutTests):
    def layout(self) -> Layout:
        return DcpLayout()


class TestDcpForecast(LayoutForecastTests):
    def layout(self) -> Layout:
        return DcpLayout()
