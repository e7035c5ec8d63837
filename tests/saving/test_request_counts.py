"""The number of requests of a save and a load of many small arrays on storage without directories."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.locations import faulty_context, through

import ckptcore

_COUNTED: Final = frozenset(
    {"get", "get_with_tag", "get_into", "size", "put", "list", "list_names", "delete", "abort_uploads", "finish"}
)
"""Operations that are requests to a service. An upload in parts takes a request per part, and two more."""


def _state() -> dict[str, Any]:
    return {f"layer {number}": np.full((8, 4), number, np.float32) for number in range(1000)}


def _requests(plan: FaultPlan) -> Counter[str]:
    return Counter([operation.name for operation in plan.operations if operation.name in _COUNTED])


@pytest.mark.parametrize(("layout", "most_to_save"), [("safetensors", 12), ("ocdbt", 19), ("dcp", 13)])
def test_many_small_arrays_take_few_requests(layout: str, most_to_save: int) -> None:
    location = f"memory://requests-{layout}/run/step_1"
    state = _state()
    saving = FaultPlan()
    ckptcore.save(through(location), state, layout=layout, context=faulty_context(location, saving))
    loading = FaultPlan()
    loaded = ckptcore.load(through(location), context=faulty_context(location, loading))
    assert all((loaded[name] == value).all() for name, value in state.items())
    assert _requests(saving).total() <= most_to_save, [
        (operation.name, operation.keys) for operation in saving.operations
    ]
    assert _requests(loading).total() <= 8, [(operation.name, operation.keys) for operation in loading.operations]


def test_a_context_tests_conditional_writes_only_once() -> None:
    location = "memory://requests-again/run/step_1"
    plan = FaultPlan()
    context = faulty_context(location, plan)
    counts = []
    for step in (1, 2):
        before = len(plan.operations)
        ckptcore.save(f"{through(location)}{step}", {"w": np.ones(3)}, context=context)
        counts.append(len(plan.operations) - before)
    assert counts[1] == counts[0] - 2
