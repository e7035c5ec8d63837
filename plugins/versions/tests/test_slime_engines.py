"""Unmodified readers of engines pull versions that the layout `slime` writes.

No distribution on PyPI has these readers, and code of other projects is not kept here. To run these tests, put the
paths of files ``python/sglang/srt/weight_sync/local_checkpoint.py`` into the environment variable
``CKPTCORE_SLIME_READERS``, separated by ``:``. They need numpy and zstandard alone. ``docs/format/slime.md`` lists the
versions that were tried. Without the variable, `slime_files.pull` is the only other reader.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ckptcore_versions.slime import SlimeLayout

import ckptcore
from plugins.versions.tests.held import HeldState, version_at
from plugins.versions.tests.slime_files import read_file
from plugins.versions.tests.test_slime_layout import bytes_of, publish_all, weights

READERS = [Path(path) for path in os.environ.get("CKPTCORE_SLIME_READERS", "").split(":") if path]

pytestmark = pytest.mark.skipif(not READERS, reason="CKPTCORE_SLIME_READERS names no reader of an engine")


@pytest.fixture(params=READERS, ids=str)
def reader(request: pytest.FixtureRequest) -> Any:
    spec = importlib.util.spec_from_file_location("local_checkpoint", request.param)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
@pytest.mark.parametrize("targets", [range(1, 8), (3, 7), (7,), (2, 4, 5), (6, 3, 7)], ids=str)
def test_an_engine_pulls_every_version(
    reader: Any, encoding: Any, checksum: Any, targets: Sequence[int], tmp_path: Path
) -> None:
    model, local = tmp_path / "model", tmp_path / "local"
    model.mkdir()
    (model / "config.json").write_text("{}")
    publish_all(str(tmp_path), 7, SlimeLayout(encoding, checksum, assets=model), full=(1, 5))
    applied = 0
    for target in targets:
        reader.pull(str(local), str(model), str(tmp_path), target)
        applied = max(applied, target)
        pulled = {name: data for file in local.glob("*.safetensors") for name, data in read_file(file)[1].items()}
        assert pulled == bytes_of(weights(applied))
        assert (local / "config.json").exists()


def test_an_engine_starts_from_its_own_model(reader: Any, tmp_path: Path) -> None:
    """Version 1 is a delta relative to the model, which the engine has as version 0."""
    zero = f"{tmp_path}/weight_v000000"
    ckptcore.save(zero, weights(1), layout=SlimeLayout().numbered(0))
    held = HeldState(version_at(zero), weights(1))
    ckptcore.save(f"{tmp_path}/weight_v000001", weights(2), layout=SlimeLayout().numbered(1).against(held))
    reader.pull(str(tmp_path / "local"), zero, str(tmp_path), 1)
    (file,) = (tmp_path / "local").glob("*.safetensors")
    assert read_file(file)[1] == bytes_of(weights(2))
