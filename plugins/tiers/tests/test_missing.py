"""The error of the core if this distribution is not installed. It names the distribution."""

from __future__ import annotations

import sys

import pytest

import ckptcore
from ckptcore.errors import MissingDistributionError


def test_the_core_alone_names_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptcore_tiers", None)
    with pytest.raises(MissingDistributionError, match=r"ckptcore\.tiers .* pip install 'ckptcore\[tiers\]'"):
        _ = ckptcore.tiers
