"""Recipes for values that no plugin handles, for error messages: what to save instead."""

from __future__ import annotations

import array
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

_TABLES: Final = (
    "save {name: column.to_numpy() for name, column in value.items()}, or column.to_list() for columns of text"
)

_NOT_LOADED: Final = (
    "PLACEHOLDER represents a leaf that was not loaded, and is no value: load the leaf, or remove it from the tree, "
    "and the checkpoint will not have it"
)

_BY_NAME: Final[Mapping[str, str]] = {
    "PIL.Image.Image": "save np.asarray(value), and PIL.Image.fromarray(array) makes the image again",
    "pandas.DataFrame": _TABLES,
    "pandas.Series": "save value.to_numpy(), or value.to_list() for text",
    "pandas.Index": "save value.to_numpy(), or value.to_list() for text",
    "pandas.Timestamp": "save value.isoformat(), and pandas.Timestamp(text) makes it again",
    "pandas.Timedelta": "save value.isoformat(), and pandas.Timedelta(text) makes it again",
    "polars.DataFrame": _TABLES.replace("value.items()", "value.to_dict().items()"),
    "polars.Series": "save value.to_numpy(), or value.to_list() for text",
}
"""Recipes by the public name of a type or of a base class of the type."""

_BY_KIND: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (types.EllipsisType, _NOT_LOADED),
    (slice, "save [value.start, value.stop, value.step]"),
    ((memoryview, array.array), "save np.asarray(value)"),
    (functools.partial, "code is not saved: save its value.args and value.keywords"),
    (types.SimpleNamespace, "save vars(value)"),
    (Mapping, "save dict(value)"),
    (Iterator, "its position is not known: save what makes it again, such as a seed and a count"),
    (Collection, "save list(value)"),
)
"""Recipes by type, abstract types last. The first type that fits is used."""


def recipe_for(value: object) -> str | None:
    """Return what to save instead of a value, as a clause; None if there is no recipe for its type."""
    for base in type(value).__mro__:
        package = base.__module__.partition(".")[0]
        for name in (f"{base.__module__}.{base.__qualname__}", f"{package}.{base.__qualname__}"):
            if name in _BY_NAME:
                return _BY_NAME[name]
        if package == "scipy" and hasattr(value, "tocoo"):
            return "save the row, col, data and shape of its .tocoo()"
        if package == "omegaconf":
            return "save OmegaConf.to_container(value)"
    return _recipe_of_kind(value)


def _recipe_of_kind(value: Any) -> str | None:
    if isinstance(value, type):
        return None
    for kinds, recipe in _BY_KIND:
        if isinstance(value, kinds):
            return recipe
    for method in ("model_dump", "to_dict"):
        if callable(getattr(value, method, None)):
            return f"save value.{method}()"
    if type(value).__module__ == "argparse":
        return "save vars(value)"
    return None
