"""Summaries of trees: dtypes, the largest arrays, and parameters apart from the states of optimizers."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptcore.model import JSON, ArrayRecord, Attribute, TreeMetadata, TreePath, format_path

_LARGEST: Final = 8
_OPTIMIZER: Final = frozenset(
    {
        "optimizer", "optimizers", "optim", "opt_state", "optimizer_state", "optimizer_states", "exp_avg",
        "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "mu", "nu", "master_params",
    }
)  # fmt: skip
"""Names of optimizer states in PyTorch, Optax, DeepSpeed and Lightning, in lower case."""


def summary_of(name: str, tree: TreeMetadata, place: str = "", *, inside: str = "") -> dict[str, Any]:
    """Return the arrays, parameters and bytes of each dtype and role, and the largest arrays. Ties are counted once.

    Args:
        name: the name of the checkpointable; empty for a checkpoint of one tree.
        tree: its tree.
        place: its place in the checkpoint.
        inside: the name of the directory, for a checkpointable that is opened alone: ``optimizer``.
    """
    counts: dict[tuple[int, bool], int] = {}
    records: dict[int, ArrayRecord] = {}  # equal arrays share a record, so most are found by identity
    sizes: dict[int, int] = {}
    above: dict[TreePath, bool] = {}
    is_inside = _is_of_optimizer((name, inside))
    aliases, paths = tree.aliases, tree.paths
    found: list[tuple[int, int]] = []
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in aliases:
            continue
        path, number = paths[leaf], id(record)
        is_state = above.get(path[:-1])
        if is_state is None:
            is_state = above[path[:-1]] = is_inside or _is_of_optimizer(path[:-1])
        is_state = is_state or _is_of_optimizer(path[-1:])
        if number not in records:
            records[number], sizes[number] = record, record.spec.nbytes
        counts[number, is_state] = counts.get((number, is_state), 0) + 1
        found.append((sizes[number], -leaf))
    dtypes: dict[str, list[int]] = {}
    roles: dict[str, list[int]] = {}
    for (number, is_state), count in counts.items():
        spec = records[number].spec
        totals = (count, count * spec.size, count * spec.nbytes)
        _add(dtypes, spec.dtype, totals)
        _add(roles, "optimizer" if is_state else _role(spec.dtype), totals)
    largest = [-number for _, number in heapq.nlargest(_LARGEST, found)]
    return {
        "dtypes": dtypes,
        "roles": roles,
        "largest": [
            {
                "part": name,
                "place": place,
                "leaf": leaf,
                "path": format_path(tree.paths[leaf]),
                "type": str(tree.leaves[leaf].spec),  # type: ignore[union-attr]  # it is an array
                "nbytes": tree.leaves[leaf].spec.nbytes,  # type: ignore[union-attr]  # it is an array
            }
            for leaf in largest
        ],
    }


def merged_summary(found: Sequence[Mapping[str, Any]]) -> JSON:
    """Return the summary of several trees together."""
    merged: dict[str, Any] = {"dtypes": {}, "roles": {}}
    for kind, totals in merged.items():
        for one in found:
            for key, counts in one[kind].items():
                _add(totals, key, counts)
    arrays = [array for one in found for array in one["largest"]]
    merged["largest"] = sorted(arrays, key=operator.itemgetter("nbytes"), reverse=True)[:_LARGEST]
    return merged


def _add(totals: dict[str, list[int]], key: str, counts: Sequence[int]) -> None:
    before = totals.get(key, (0, 0, 0))
    totals[key] = [old + new for old, new in zip(before, counts, strict=True)]


def _role(dtype: str) -> str:
    """Return the role of an array that is not part of an optimizer: only floating point numbers are trained."""
    return "parameters" if "float" in dtype or dtype.startswith("complex") else "other"


def _is_of_optimizer(path: TreePath) -> bool:
    for key in path:
        text = key.name if isinstance(key, Attribute) else key
        if isinstance(text, str) and not _OPTIMIZER.isdisjoint(text.lower().split(".")):
            return True
    return False
