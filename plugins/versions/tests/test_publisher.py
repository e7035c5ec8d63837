"""Publishing versions in one process: deltas, numbers, full versions, restarts, failures, labels, memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.locations import new_place
from ckptcore_testing.trees import same_value
from ckptcore_versions import Publisher, labels
from plugins.versions.tests.toy_deltas import ToyPlugin

import ckptcore
from ckptcore.context import PluginOptions

CONTEXT = ckptcore.Context(plugins=PluginOptions(extra=[ToyPlugin()]), durability="none")


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new directory of versions: on a file system, which has renames, or in memory, with conditional puts."""
    return new_place(request.param, tmp_path)


def weights(number: int) -> dict[str, Any]:
    """Return weights of which a few elements change from number to number."""
    generator = np.random.default_rng(0)
    embedding = generator.standard_normal((64, 32)).astype(np.float32)
    embedding[: number + 1, 0] += 1
    return {"embedding": embedding, "layers": [{"w": np.arange(100) + number, "b": np.zeros(3)}], "scale": 1.5}


def publisher(place: str, **options: Any) -> Publisher:
    return Publisher(place, **{"layout": "toy-deltas", "context": CONTEXT, **options})


def load(place: str, number: int) -> Any:
    return ckptcore.load(f"{place}/v{number:06d}", context=CONTEXT)


def bases(place: str, number: int) -> list[str]:
    metadata = ckptcore.metadata(f"{place}/v{number:06d}", context=CONTEXT)
    return [base for base in getattr(metadata, "bases", ())]


@pytest.mark.parametrize("background", [False, True])
def test_each_version_loads_the_weights_that_were_published(place: str, background: bool) -> None:
    with publisher(place) as versions:
        for number in (1, 2, 5):
            given = weights(number)
            versions.publish(number, given, background=background)
            given["embedding"][:] = 7  # the weights may change
            given["layers"][0]["w"][:] = 7
        versions.wait()
        assert versions.latest == 5
    for number in (1, 2, 5):
        assert same_value(load(place, number), weights(number))
        ckptcore.verify(f"{place}/v{number:06d}", context=CONTEXT)
