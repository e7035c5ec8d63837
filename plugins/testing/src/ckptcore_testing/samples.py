"""Samples: what a plugin gives the matrix of all frameworks, layouts and storages, so that it is tested with no edit.

A distribution offers them by entry points in the group ``ckptcore_testing``; each names one sample::

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

__all__ = [
    "SAMPLE_GROUP",
    "ContainerSample",
    "FrameworkSample",
    "LayoutSample",
    "Sample",
    "Samples",
    "StorageSample",
    "installed_samples",
]

SAMPLE_GROUP: Final = "ckptcore_testing"
"""The group of the entry points that name samples."""


@dataclass(frozen=True, slots=True)
class ContainerSample:
    """A type of containers.

    Attributes:
        name: shown in the names of the tests.
        make: makes a container of two children, leaves or other containers.
        children: the two children of such a container.
    """

    name: str
    make: Callable[[Sequence[Any]], Any]
    children: Callable[[Any], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSample:
    """A framework whose arrays are leaves.

    Attributes:
        name: shown in the names of the tests; unique.
        dtypes: the dtypes it has, by their names in checkpoints.
        make: makes an array with these elements, in memory of its own.
        abstract: makes an abstract leaf that asks for an array of this shape and dtype.
        elements: the elements of an array, found without ckptcore.
        array_type: the type of what loads.
        fills: whether `ckptcore.load_into` changes the array itself.
        containers: types of containers that the framework brings along.
        session: entered while the sample is used, for settings of the framework that `dtypes` needs.
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
        scheme: its URL scheme; unique.
        open: given an empty directory for what it needs, gives for a while a location at which nothing stands. It may
            start a server and stop it again.
        costly: whether a request costs so much that of its combinations only those of the first framework are quick
            tests.
        aliases: other schemes that name the same, and are not tried beside it.
        without_conditions: what is saved there is saved with this in its `Context`; ``"marker"`` where puts cannot be
            conditional.
    """

    scheme: str
    open: Callable[[Path], AbstractContextManager[str]]
    costly: bool = False
    aliases: Collection[str] = ()
    without_conditions: WithoutConditions = "refuse"

    @property
    def schemes(self) -> frozenset[str]:
        """Its scheme and the aliases."""
        return frozenset({self.scheme, *self.aliases})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSample:
    """What the matrix has to know of a layout; one that saves, and refuses no dtype, needs no sample.

    Attributes:
        name: of the layout.
        refused_dtypes: dtypes that it refuses.
        saves: whether it can be saved with at all; the matrix leaves one out that only reads what other software wrote.
    """

    name: str
    refused_dtypes: Collection[str] = ()
    saves: bool = True


Sample: TypeAlias = FrameworkSample | StorageSample | LayoutSample
"""What an entry point in `SAMPLE_GROUP` names."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples by name or scheme, and by the name of the distribution that offers them.

    Attributes:
        frameworks, layouts, storages: the samples, sorted by name.
        offered: by distribution, its samples.
    """

    frameworks: Mapping[str, FrameworkSample] = field(default_factory=dict)
    layouts: Mapping[str, LayoutSample] = field(default_factory=dict)
    storages: Mapping[str, StorageSample] = field(default_factory=dict)
    offered: Mapping[str, Sequence[Sample]] = field(default_factory=dict)


def installed_samples() -> Samples:
    """The samples of everything installed.

    Raises:
        PluginError: if an entry point names something else, or two samples have one name.
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
                raise PluginError(f"the entry point {entry_point.name} of {SAMPLE_GROUP} names {sample!r}, no sample")
        distribution = "" if entry_point.dist is None else entry_point.dist.name
        offered.setdefault(distribution, []).append(sample)
    return Samples(frameworks, layouts, storages, offered)


def _add(samples: dict[str, Any], name: str, sample: Sample) -> None:
    if samples.setdefault(name, sample) is not sample:
        raise PluginError(f"two samples are named {name!r}: names are unique, uninstall one of the distributions")
