"""Weights to publish in tests, and what a directory of versions then contains."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
from ckptcore_testing.locations import store_at
from ckptcore_versions import Publisher

import ckptcore
from ckptcore.context import JobOptions
from ckptcore.protocols import Coordinator

CONTEXT = ckptcore.Context(durability="none")


def weights(number: int) -> dict[str, Any]:
    """Return weights of which a few elements change from number to number. `frozen` does not change."""
    embedding = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    embedding[: number % 64 + 1, 0] += 1
    layers = [{"w": np.arange(100.0) + number, "b": np.zeros(3, np.int16)}]
    return {"embedding": embedding, "layers": layers, "frozen": np.ones((7, 5)), "scale": 1.5}


def matrix(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a matrix of 24 rows and 18 columns, of which some elements in all parts change from number to number."""
    array = np.random.default_rng(1).standard_normal((24, 18)).astype(np.float32)
    array[number % 2 :: 2, number % 3 :: 3] += number
    return array


def publisher(place: str, **options: Any) -> Publisher:
    """Return a Publisher with the Context of these tests."""
    return Publisher(place, **{"context": CONTEXT, **options})


def location(place: str, number: int) -> str:
    """Return the location of a version."""
    return f"{place}/v{number:06d}"


def load(place: str, number: int) -> Any:
    """Return the weights of a version."""
    return ckptcore.load(location(place, number), context=CONTEXT)


def root_of(place: str, number: int) -> dict[str, Any]:
    """Return the root of a version as JSON."""
    root: dict[str, Any] = json.loads(store_at(location(place, number)).get("checkpoint.json"))
    return root


def base_of(place: str, number: int) -> int | None:
    """Return the number of the base of a version; None for a full version."""
    bases = root_of(place, number).get("bases", [])
    return int(bases[0][0].removeprefix("v")) if bases else None


def present(place: str) -> list[int]:
    """Return the numbers of the versions in a directory."""
    names = store_at(place).list_names()
    return sorted(int(name[1:-1]) for name in names if name.startswith("v"))


def in_job(coordinator: Coordinator, context: ckptcore.Context = CONTEXT) -> ckptcore.Context:
    """Return a Context of a process of a job."""
    return replace(context, job=JobOptions(coordinator=coordinator))
