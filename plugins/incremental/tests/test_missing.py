"""Errors of the core if this distribution is not installed. They name it."""

from __future__ import annotations

import sys

import pytest

import ckptcore
from ckptcore.errors import MissingDistributionError


@pytest.mark.parametrize(("name", "module"), [("partial", "partial_checkpoint"), ("Update", "updates")])
def test_the_core_alone_names_the_distribution(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.delitem(sys.modules, f"ckptcore_incremental.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "ckptcore_incremental", None)
    expected = rf"ckptcore\.{name} .* pip install 'ckptcore\[incremental\]'"
    with pytest.raises(MissingDistributionError, match=expected):
        getattr(ckptcore, name)
