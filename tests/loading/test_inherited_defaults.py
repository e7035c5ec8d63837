"""Plugin objects that do not inherit from the class of their protocol. Errors name their class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import ckptcore
from ckptcore import Context, hookimpl
from ckptcore.context import PluginOptions
from ckptcore.errors import PluginError
from ckptcore.protocols import (
    ContainerHandler,
    Flattened,
    Layout,
    LayoutFactory,
    StorageBackend,
    StorageOpener,
    StorageOptions,
)


class Pair:
    """A type that the plugin handles as a container."""


class Structural:
    """A class with the required methods of a container handler that does not inherit from it."""

    priority = 100

    def flatten(self, value: Pair) -> Flattened:
        return Flattened("object", (), (), "Pair")

    def unflatten(self, like: Pair, children: Sequence[object]) -> object:
        return Pair()


class LooksLikeALayout:
    """A class with the name of a layout, but without the default methods."""

    name = "structural"


class LooksLikeAStorage:
    """A class without any method of a storage."""


class StructuralPlugin:
    """A plugin that offers the handler, the layout and the storage above."""

    @hookimpl
    def ckpt_container_handler(self, value_type: type) -> ContainerHandler | None:
        return cast(ContainerHandler, Structural()) if value_type is Pair else None

    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        return {"structural": lambda: cast(Layout, LooksLikeALayout())}

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"structural": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        return cast(StorageBackend, LooksLikeAStorage())


CONTEXT = Context(plugins=PluginOptions(extra=[StructuralPlugin()]))


@pytest.mark.parametrize(
    ("options", "offered", "protocol"),
    [
        ({"state": {"pair": Pair()}}, "Structural", "ContainerHandler"),
        ({"layout": "structural"}, "LooksLikeALayout", "Layout"),
        ({"layout": cast(Layout, LooksLikeALayout())}, "LooksLikeALayout", "Layout"),
        ({"location": "structural://store/step"}, "LooksLikeAStorage", "StorageBackend"),
    ],
    ids=["handler", "layout by name", "layout", "storage"],
)
def test_the_error_names_the_class_to_inherit_from(
    options: dict[str, Any], offered: str, protocol: str, tmp_path: Path
) -> None:
    location, state = options.pop("location", tmp_path / "c"), options.pop("state", {"w": np.ones(2)})
    with pytest.raises(PluginError, match=rf"{offered} must inherit from ckptcore\.protocols\.{protocol}"):
        ckptcore.save(location, state, context=CONTEXT, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_handler_of_a_context_must_inherit_too(tmp_path: Path) -> None:
    context = Context(plugins=PluginOptions(handlers={Pair: cast(ContainerHandler, Structural())}))
    with pytest.raises(PluginError, match="inherit from LeafHandler, ContainerHandler or CheckpointableHandler"):
        ckptcore.save(tmp_path / "c", {"pair": Pair()}, context=context)


def test_checkpoints_that_need_no_invalid_object_are_saved_and_loaded(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(3)}, context=CONTEXT)
    assert ckptcore.load(tmp_path / "c", context=CONTEXT)["w"].tolist() == [0, 1, 2]
