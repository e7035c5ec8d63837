"""Summaries of trees: dtypes, the largest arrays, and parameters apart from the states of optimizers."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptcore.model import JSON, ArrayRecord, Attribute, TreeMetadata, TreePath, format_path

__all__ = ["merged_summary", "summary_of"]

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
    dtypes: dict[str, list[int]] = {}
    roles: dict[str, list[int]] = {}
    sizes: list[tuple[int, int]] = []
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases:
            continue
        spec = record.spec
        role = "optimizer" if _is_of_optimizer((name, inside, *tree.paths[leaf])) else _role(spec.dtype)
        for totals, key in ((dtypes, spec.dtype), (roles, role)):
            _add(totals, key, (1, spec.size, spec.nbytes))
        sizes.append((spec.nbytes, -leaf))
    largest = [-number for _, number in heapq.nlargest(_LARGEST, sizes)]
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
