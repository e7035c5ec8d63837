"""States of optimizers in a tree, which files of weights for other software must not have unasked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import Attribute, Node, Skeleton, TreePath, leaf_count

_NAMES: Final = frozenset((
    "opt", "opt_state", "opt_states", "optim", "optim_state", "optimizer", "optimizer_state", "optimizer_state_dict",
    "optimizer_states", "optimizer_variables", "optimizers",
))  # fmt: skip
"""Names of the states of optimizers in programs, in PyTorch Lightning, Flax, Keras and Megatron."""

_AMBIGUOUS: Final = "opt"
"""Of these, the name that models have too, for example of an optical tower: a state has one of `_ENTRIES`."""

_ENTRIES: Final = frozenset((
    "exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "state", "param_groups", "mu", "nu", "trace",
    "learning_rate",
))  # fmt: skip
"""Names in the states of PyTorch, optax and Keras."""

_DEEPEST: Final = 3
"""Number of keys in the paths that are searched: a training state has the optimizer near its root."""

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class OptimizerParts:
    """The optimizers in a tree.

    Attributes:
        optimizers: the paths of their states, as texts for `subtree`.
        others: the paths of the subtrees with arrays next to them.
        drops: for each state, the pattern of its leaves, for the transform `Drop`.
    """

    optimizers: Sequence[str]
    others: Sequence[str]
    drops: Sequence[str]

    @property
    def transforms(self) -> str:
        """The transforms that leave the states out, as Python code."""
        return f"[{', '.join([f'Drop({pattern!r})' for pattern in self.drops])}]"

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
    texts = list(dict.fromkeys(map(_text, optimizers)))
    drops = list(dict.fromkeys(map(_pattern, optimizers)))
    return OptimizerParts(texts, list(map(_text, others)), drops)


def _is_optimizer(node: Skeleton, path: TreePath) -> bool:
    """Return True for the name of an optimizer, also at the start of a name with dots, and for known forms."""
    first, *rest = _name(path).lower().split(".") if path else [""]
    if first in _NAMES and (isinstance(node, Node) or rest):
        return first != _AMBIGUOUS or not _ENTRIES.isdisjoint(rest) or _has_entry(node)
    if not isinstance(node, Node):
        return False
    names = {_name((key,)) for key in node.keys}
    return {"state", "param_groups"} <= names or {"mu", "nu"} <= names  # of PyTorch, and of optax


def _has_entry(node: Skeleton) -> bool:
    """Return True if a name of `_ENTRIES` is in a subtree."""
    if not isinstance(node, Node):
        return False
    names = {part for key in node.keys for part in _name((key,)).split(".")}
    return not _ENTRIES.isdisjoint(names) or any(map(_has_entry, node.children))


def _name(path: TreePath) -> str:
    key = path[-1]
    return key.name if isinstance(key, Attribute) else str(key)


def _children(node: Node, path: TreePath, first: int) -> Iterator[tuple[Skeleton, TreePath, int]]:
    for key, child in zip(node.keys, node.children, strict=True):
        yield child, (*path, key), first
        first += leaf_count(child)


def _pattern(path: TreePath) -> str:
    if not path:
        return "**"
    return f"{_text(path)}{'.' if '.' in _name(path) else '/'}**"


def _text(path: TreePath) -> str:
    """Return a path as text; of a name with dots, the first part."""
    return "/".join([*map(str, path[:-1]), *[str(key).partition(".")[0] for key in path[-1:]]])
