"""Recipes for values that no plugin handles, for error messages. Each recipe keeps the whole value."""

from __future__ import annotations

import array
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

_TABLES: Final = (
    "save {name: column.to_numpy() for name, column in value.items()}, or column.to_list() for columns of text"
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
"""Recipes by the public name of a type or of one of its bases."""


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
    match value:
        case types.EllipsisType():
            return (
                "PLACEHOLDER represents a leaf that was not loaded, and is no value: load the leaf, or remove it from "
                "the tree, and the checkpoint will not have it"
            )
        case slice():
            return "save [value.start, value.stop, value.step]"
        case memoryview():
            return "save np.asarray(value)"
        case array.array():
            return "save np.asarray(value)"
        case functools.partial():
            return "code is not saved: save its value.args and value.keywords"
        case types.SimpleNamespace():
            return "save vars(value)"
        case Mapping():
            return "save dict(value)"
        case Iterator():
            return "its position is not known: save what makes it again, such as a seed and a count"
        case Collection():
            return "save list(value)"
    for method in ("model_dump", "to_dict"):
        if callable(getattr(value, method, None)):
            return f"save value.{method}()"
    if type(value).__module__ == "argparse":
        return "save vars(value)"
    return None
