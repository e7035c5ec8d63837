"""Storage that counts requests and injects faults, and a leaf that loads one box of an array."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ckptcore_testing import FaultPlan, with_faults

from ckptcore import Context, hookimpl
from ckptcore.context import IOOptions, PluginOptions
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import LeafHandler, StorageBackend, StorageOpener, StorageOptions

_SCHEME: Final = "counted"


@dataclasses.dataclass(frozen=True)
class CountedPlugin:
    """Storage ``counted://``: local files behind a fault plan, which counts requests and bytes."""

    plan: FaultPlan

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(installed_plugins().storage("file")(url.replace(_SCHEME, "file", 1), options), self.plan)

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {_SCHEME: self._open}


def place(path: Path) -> str:
    """Return the URL of a file or directory in the storage ``counted://``."""
    return f"{_SCHEME}://{path}"


def counted(plan: FaultPlan) -> Context:
    """Return a context whose storage has a fault plan. Its operations run in a fixed order."""
    return Context(
        plugins=PluginOptions(extra=(CountedPlugin(plan),), handlers={Part: PartHandler()}),
        io=IOOptions(threads=1),
        durability="none",
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """Request for one box of a NumPy array, like that of one process of a job."""

    spec: ArraySpec
    box: Box


class PartHandler(LeafHandler):
    """Loads only the requested box."""

    priority = 0

    def describe(self, leaf: Part) -> ArrayRecord:
        return ArrayRecord(leaf.spec)

    def identity(self, leaf: Part) -> object:
        return id(leaf)

    def wanted(self, abstract: Part, stored: ArrayRecord) -> Sequence[Box]:
        return (abstract.box,)

    def build(self, abstract: Part, stored: ArrayRecord, boxes: Sequence[tuple[Box, HostArray]]) -> Any:
        ((_, array),) = boxes
        return array

    def abstract(self, *_: Any) -> Any:
        raise NotImplementedError

    shards = copy_to_host = view_on_host = abstract
