"""Objects that give and take their state themselves, by methods that many libraries agree on."""

from __future__ import annotations

from typing import Any, Final

from ckptcore.builtin.signatures import takes_only
from ckptcore.builtin.states_to_load import state_to_load
from ckptcore.errors import UnsupportedLeafError
from ckptcore.protocols import CheckpointableHandler, Priority

__all__ = ["GetStateHandler", "StateDictHandler", "StateTreeHandler", "state_handler"]


class StateDictHandler:
    """Objects with ``state_dict()`` and ``load_state_dict(state)``: data loaders, schedulers, metrics.

    Each process has a state of its own. What is loaded has the structure that was saved, also where the object is new and
    has another state as yet. ``load(location, obj)`` gives the state; ``load_into`` gives it to the object.
    """

    priority = Priority.PROTOCOL
    per_process = True

    def flatten(self, value: Any) -> object:
        """The state dict."""
        return value.state_dict()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """What is stored, with the types of what `value` has at the same places."""
        return state_to_load(value.state_dict(), stored)

    def unflatten(self, like: Any, state: object) -> object:
        """The state itself, for ``like.load_state_dict``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Load the state dict."""
        target.load_state_dict(state)


class GetStateHandler:
    """Objects with ``get_state()`` and ``set_state(state)``: iterators over data. A state may be a tree, or bytes.

    Otherwise as `StateDictHandler`.
    """

    priority = Priority.PROTOCOL
    per_process = True

    def flatten(self, value: Any) -> object:
        """The state."""
        return value.get_state()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """What is stored, with the types of what `value` has at the same places."""
        return state_to_load(value.get_state(), stored)

    def unflatten(self, like: Any, state: object) -> object:
        """The state itself, for ``like.set_state``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Set the state."""
        target.set_state(state)


class StateTreeHandler:
    """Objects with ``get_state_tree()`` and ``set_state_tree(tree)``: models with their optimizer and metrics.

    These setters pass over what they do not know, without a word. So a load asks for exactly the variables that the object
    has, and the difference is told. Two may be there later: variables of an optimizer that made no step, which is built;
    and metrics, which are started anew where the object has none yet.

    Every process is taken to hold the same arrays, or shards of them.
    """

    priority = Priority.PROTOCOL
    per_process = False

    def flatten(self, value: Any) -> object:
        """The tree of its variables.

        Raises:
            UnsupportedLeafError: if it is to have an optimizer and has none yet.
        """
        if getattr(value, "optimizer", value) is None:
            raise UnsupportedLeafError(
                f"a {type(value).__qualname__} without an optimizer gives no state tree; compile it first, or save its weights"
            )
        return value.get_state_tree()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """The tree of its variables, those of its optimizer too, with the metrics that are stored."""
        tree = self.flatten(value)
        if not isinstance(stored, dict) or not isinstance(tree, dict):
            return tree
        optimizer = getattr(value, "optimizer", None)
        if stored.get(_OPTIMIZER) and not getattr(optimizer, "built", True):
            optimizer.build(value.trainable_variables)  # type: ignore[union-attr]  # None has nothing that is False
            tree = value.get_state_tree()
        if stored.get(_METRICS):
            tree = {**tree, _METRICS: state_to_load(tree.get(_METRICS), stored[_METRICS])}
        return tree

    def unflatten(self, like: Any, state: object) -> object:
        """The tree itself, for ``like.set_state_tree``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Set the variables."""
        target.set_state_tree(state)


_OPTIMIZER: Final = "optimizer_variables"
_METRICS: Final = "metrics_variables"

_PROTOCOLS: Final[tuple[tuple[str, str, CheckpointableHandler], ...]] = (
    # First, because such a model may have a state dict too, from the framework below it, without its optimizer.
    ("get_state_tree", "set_state_tree", StateTreeHandler()),
    ("state_dict", "load_state_dict", StateDictHandler()),
    ("get_state", "set_state", GetStateHandler()),
)
"""How a state is got, how it is set, and who does it, in the order of precedence."""


def state_handler(value_type: type) -> CheckpointableHandler | None:
    """The handler for objects of a type that has the methods of one of the protocols; None for other types."""
    for getter, setter, handler in _PROTOCOLS:
        if takes_only(value_type, getter, 0) and takes_only(value_type, setter, 1):
            return handler
    return None
