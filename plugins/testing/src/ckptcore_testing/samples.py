"""Samples of frameworks, layouts and storages. `ckptcore_testing.matrix` tests combinations of all installed samples.

A distribution offers samples by entry points in the group ``ckptcore_testing``, one per sample::

    [project.entry-points."ckptcore_testing"]
    torch = "ckptcore_torch.testing:SAMPLE"

Only tests load them, so their modules may import the framework.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from ckptcore.context import WithoutConditions
from ckptcore.errors import PluginError
from ckptcore.model import ArraySpec, HostArray

SAMPLE_GROUP: Final = "ckptcore_testing"
"""The entry point group of samples."""


@dataclass(frozen=True, slots=True)
class ContainerSample:
    """A type of containers.

    Attributes:
        name: the name in test ids.
        make: creates a container of two children, which are leaves or containers.
        children: returns the two children.
    """

    name: str
    make: Callable[[Sequence[Any]], Any]
    children: Callable[[Any], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSample:
    """A framework whose arrays are leaves.

    Attributes:
        name: the unique name, also in test ids.
        dtypes: the supported dtypes, by their names in checkpoints.
        make: creates an array with these elements, in new memory.
        abstract: creates an abstract leaf of this shape and dtype.
        elements: returns the elements of an array, without ckptcore.
        array_type: the type of loaded arrays.
        fills: True if `ckptcore.load_into` changes the array in place.
        containers: container types of the framework.
        session: returns a context manager that applies the settings of the framework that `dtypes` require.
    """

    name: str
    dtypes: Collection[str]
    make: Callable[[HostArray], Any]
    abstract: Callable[[ArraySpec], Any]
    elements: Callable[[Any], HostArray]
    array_type: type
    fills: bool
    containers: Sequence[ContainerSample] = ()
    session: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSample:
    """A storage.

    Attributes:
        scheme: the unique URL scheme.
        open: takes an empty local directory, and returns a context manager for a new location. It may run a server.
        costly: True if requests are slow. Quick tests then combine the storage only with the first framework.
        aliases: equivalent schemes, which are not tested separately.
        without_conditions: `IOOptions.without_conditions` for saves to this storage: ``"marker"`` if the storage has no
            conditional puts.
    """

    scheme: str
    open: Callable[[Path], AbstractContextManager[str]]
    costly: bool = False
    aliases: Collection[str] = ()
    without_conditions: WithoutConditions = "refuse"

    @property
    def schemes(self) -> frozenset[str]:
        """The scheme and its aliases."""
        return frozenset({self.scheme, *self.aliases})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSample:
    """Restrictions of a layout. A layout without restrictions needs no sample.

    Attributes:
        name: the name of the layout.
        refused_dtypes: dtypes that the layout does not support.
        saves: False if the layout can only read checkpoints of other software. The matrix then leaves the layout out.
    """

    name: str
    refused_dtypes: Collection[str] = ()
    saves: bool = True


Sample: TypeAlias = FrameworkSample | StorageSample | LayoutSample
"""The type of entry points in `SAMPLE_GROUP`."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples by name or scheme, and by distribution.

    Attributes:
        frameworks, layouts, storages: the samples by name (storages by scheme), in order of their entry points' names.
        offered: the samples of each distribution, by the name of the distribution.
    """

    frameworks: Mapping[str, FrameworkSample] = field(default_factory=dict)
    layouts: Mapping[str, LayoutSample] = field(default_factory=dict)
    storages: Mapping[str, StorageSample] = field(default_factory=dict)
    offered: Mapping[str, Sequence[Sample]] = field(default_factory=dict)


def installed_samples() -> Samples:
    """Return the samples of all installed distributions.

    Raises:
        PluginError: if an entry point is not a sample, or two samples of one kind have the same name.
    """
    frameworks: dict[str, FrameworkSample] = {}
    layouts: dict[str, LayoutSample] = {}
    storages: dict[str, StorageSample] = {}
    offered: dict[str, list[Sample]] = {}
    for entry_point in sorted(importlib.metadata.entry_points(group=SAMPLE_GROUP), key=lambda entry: entry.name):
        sample = entry_point.load()
        match sample:
            case FrameworkSample():
                _add(frameworks, sample.name, sample)
            case LayoutSample():
                _add(layouts, sample.name, sample)
            case StorageSample():
                _add(storages, sample.scheme, sample)
            case _:
                raise PluginError(f"the entry point {entry_point.name} of {SAMPLE_GROUP} is {sample!r}, not a sample")
        distribution = "" if entry_point.dist is None else entry_point.dist.name
        offered.setdefault(distribution, []).append(sample)
    return Samples(frameworks, layouts, storages, offered)


def _add(samples: dict[str, Any], name: str, sample: Sample) -> None:
    if samples.setdefault(name, sample) is not sample:
        raise PluginError(f"two samples have the name {name!r}. Uninstall one of the distributions")
