"""The versions of the libraries that the adapters are tested with."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

_PINS = dict(
    line.split("==")
    for line in (Path(__file__).parents[4] / "constraints.txt").read_text().splitlines()
    if "==" in line
)


@pytest.mark.parametrize(
    "library",
    ["accelerate", "keras", "lightning", "mlflow-skinny", "ray", "torchtitan", "transformers", "wandb"],
)
def test_the_pinned_version_is_installed(library: str) -> None:
    assert importlib.metadata.version(library) == _PINS[library]
