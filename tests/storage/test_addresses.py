"""Addresses of directories in a storage: URLs that open the same directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptcore.builtin.local import open_local
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.protocols import StorageOptions

NAMES = ["plain", "%2e%2e", "a%2fb", "a?b", "a#b", "a b", "a|b", "%", "größe", os.fsdecode(b"\xff")]
OPTIONS = StorageOptions(durable=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_address_of_a_subdirectory_opens_the_same_files(name: str, tmp_path: Path) -> None:
    inner = subdirectory(subdirectory(open_local(str(tmp_path), OPTIONS), name), "inner")
    inner.put("key", b"data")
    assert inner.address is not None
    assert inner.address.url.endswith("/inner/")
    assert open_local(inner.address.url, OPTIONS).get("key") == b"data"
    assert (tmp_path / name / "inner" / "key").read_bytes() == b"data"
