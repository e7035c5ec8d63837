"""States of optimizers in a tree, which files of weights for other software must not have unasked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import Node, Skeleton, TreePath, leaf_count

__all__ = ["OptimizerParts", "find_optimizers"]

_NAMES: Final = frozenset((
    "opt", "opt_state", "opt_states", "optim", "optim_state", "optimizer", "optimizer_state", "optimizer_state_dict",
    "optimizer_states", "optimizer_variables", "optimizers",
))  # fmt: skip
"""Names of the states of optimizers in programs, in PyTorch Lightning, Flax, Keras and Megatron."""

_DEEPEST: Final = 3
"""Number of keys in the paths that are searched: a training state has the optimizer near its root."""

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class OptimizerParts:
    """The optimizers in a tree.

    Attributes:
        optimizers: the paths of their states, as texts for `subtree`.
        others: the paths of the subtrees with arrays next to them.
    """

    optimizers: Sequence[str]
    others: Sequence[str]

    def __str__(self) -> str:
        more = f" and {len(self.optimizers) - _SHOWN} more" if len(self.optimizers) > _SHOWN else ""
        return f"the state of an optimizer in {', '.join(map(repr, self.optimizers[:_SHOWN]))}{more}"


def find_optimizers(tree: TreeMetadata) -> OptimizerParts | None:
    """Return the optimizers in a tree whose states have arrays; None if there are none."""
    has_array = [isinstance(record, ArrayRecord) for record in tree.leaves]
    optimizers: list[TreePath] = []
    others: list[TreePath] = []

    def visit(node: Skeleton, path: TreePath, first: int) -> bool:
        """Return True if an optimizer is at or below a path."""
        if not any(has_array[first : first + leaf_count(node)]):
            return False
        if _is_optimizer(node, path):
            optimizers.append(path)
            return True
        if not isinstance(node, Node) or len(path) == _DEEPEST:
            return False
        children = list(_children(node, path, first))
        found = [visit(*child) for child in children]
        if any(found):
            others.extend(
                below
                for (child, below, start), holds in zip(children, found, strict=True)
                if not holds and isinstance(child, Node) and any(has_array[start : start + leaf_count(child)])
            )
        return any(found)

    if not visit(tree.skeleton, (), 0):
        return None
    return OptimizerParts(list(dict.fromkeys(map(_text, optimizers))), list(map(_text, others)))


def _is_optimizer(node: Skeleton, path: TreePath) -> bool:
    """Return True for the name of an optimizer, also at the start of a name with dots, and for PyTorch's form."""
    if path and str(path[-1]).partition(".")[0].lower() in _NAMES:
        return True
    return isinstance(node, Node) and {"state", "param_groups"} <= set(map(str, node.keys))


def _children(node: Node, path: TreePath, first: int) -> Iterator[tuple[Skeleton, TreePath, int]]:
    for key, child in zip(node.keys, node.children, strict=True):
        yield child, (*path, key), first
        first += leaf_count(child)


def _text(path: TreePath) -> str:
    """Return a path as text; of a name with dots, the first part."""
    return "/".join([*map(str, path[:-1]), *[str(key).partition(".")[0] for key in path[-1:]]])
