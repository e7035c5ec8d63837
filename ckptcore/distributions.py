"""Table of the distributions of this project, with the features that each adds.

Error messages take the ``pip install`` command from this table. `ckptcore` takes its lazy names from the table. Lazy
names are attributes that are imported from another distribution at their first use, such as `ckptcore.copy`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from ckptcore.errors import MissingDistributionError
from ckptcore.records import NamedTuple

_EMPTY: Final[Mapping[str, str]] = {}


class Distribution(NamedTuple):
    """A distribution and the features that it adds.

    Attributes:
        extra: the extra of `ckptcore` that installs it: ``pip install 'ckptcore[extra]'``.
        package: its import package.
        names: attributes of `ckptcore` that it defines, each with its module in `package`. An empty module means
            `package` itself.
        internals: functions and types that the core uses if it is installed, each with its module in `package`.
        types: top-level packages whose types it handles.
        schemes: URL schemes that it opens.
        layouts: layouts that it adds.
        suffixes: suffixes of file names that its layouts read.
    """

    extra: str
    package: str
    names: Mapping[str, str] = _EMPTY
    internals: Mapping[str, str] = _EMPTY
    types: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        """The command that installs it."""
        return f"pip install 'ckptcore[{self.extra}]'"


DISTRIBUTIONS: Final = (
    Distribution("jax", "ckptcore_jax", types=("equinox", "flax", "jax", "jaxlib", "optax")),
    Distribution("torch", "ckptcore_torch", types=("torch",)),
    Distribution("s3", "ckptcore_s3", schemes=("s3",)),
    Distribution("gcs", "ckptcore_gcs", schemes=("gcs", "gs")),
    Distribution("azure", "ckptcore_azure", schemes=("abfs", "abfss", "az", "azure")),
    Distribution(
        "dcp",
        "ckptcore_dcp",
        layouts=("dcp", "torch"),
        suffixes=(".bin", ".ckpt", ".distcp", ".metadata", ".pt", ".pth"),
    ),
    Distribution(
        "orbax",
        "ckptcore_orbax",
        internals={"SavesToDirectoryAsyncHandler": "orbax.asynchronous_objects"},
        layouts=("ocdbt", "zarr", "zarr3"),
        suffixes=(".msgpack", ".zarray", "_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "zarr.json"),
    ),
    Distribution(
        "fsspec",
        "ckptcore_fsspec",
        schemes=("ftp", "hdfs", "hf", "http", "https", "sftp", "webhdfs"),
    ),
    Distribution(
        "formats",
        "ckptcore_formats",
        internals={"open_archive": "archives"},
        layouts=("deepspeed", "hdf5", "numpy", "pickle", "ranks", "torch-checkpointing"),
        suffixes=(".h5", ".hdf5", ".joblib", ".keras", ".npy", ".npz", ".pickle", ".pkl"),
    ),
    Distribution("ray", "ckptcore_ray"),
    Distribution("collective", "ckptcore_collective", internals={"SharedAttempt": "shared"}),
    Distribution("incremental", "ckptcore_incremental", names={"Update": "updates", "partial": "partial_checkpoint"}),
    Distribution("integrations", "ckptcore_integrations"),
    Distribution("recovery", "ckptcore_recovery", schemes=("peers",)),
    Distribution("testing", "ckptcore_testing"),
    Distribution("tiers", "ckptcore_tiers", names={"tiers": ""}),
    Distribution(
        "transforms",
        "ckptcore_transforms",
        names={"transforms": ""},
        internals={"apply_transforms": "transformed"},
    ),
    Distribution(
        "tools",
        "ckptcore_tools",
        names={
            "copy": "copies",
            "copy_steps": "copies",
            "diff": "comparison",
            "plan": "dry_run",
            **dict.fromkeys(("Export", "StepExport", "StepExports", "WithExports"), "exports"),
        },
        internals={"main": "cli"},
    ),
    Distribution("versions", "ckptcore_versions", layouts=("deltas", "slime")),
    Distribution("view", "ckptcore_view", internals={"to_html": "notebook"}),
)


def install_hint(
    *,
    value_type: type | None = None,
    framework: str = "",
    scheme: str = "",
    layout: str = "",
    files: Iterable[str] = (),
) -> str:
    """Return the ``pip install`` command that adds support for the argument, in backquotes.

    Args:
        value_type: a type of leaves or containers, or a subclass of such a type.
        framework: the name of a framework.
        scheme: a URL scheme.
        layout: the name of a layout.
        files: names of files in a checkpoint of other software.

    Returns:
        The command; empty if no distribution of this project adds the support, or if that distribution is installed.
    """
    packages = {base.__module__.partition(".")[0] for base in value_type.__mro__} if value_type is not None else set()
    for distribution in DISTRIBUTIONS:
        adds = (
            not packages.isdisjoint(distribution.types)
            or framework in distribution.types
            or scheme in distribution.schemes
            or layout in distribution.layouts
            or any(file.endswith(distribution.suffixes) for file in files)
        )
        if adds:
            return "" if _is_installed(distribution.package) else f"`{distribution.hint}`"
    return ""


def lazy_names() -> Mapping[str, Distribution]:
    """Return the attributes of `ckptcore` that other distributions define, with their distributions."""
    return {name: distribution for distribution in DISTRIBUTIONS for name in distribution.names}


def installed_names() -> Sequence[str]:
    """Return the lazy names whose distributions are installed. Import no distribution."""
    return [name for name, distribution in lazy_names().items() if _is_installed(distribution.package)]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # raised by import finders that block a package
        return False


def import_name(name: str, *, purpose: str = "") -> object:
    """Import an attribute of `ckptcore`, or a function or type that the core uses, from another distribution.

    Args:
        name: its name in the table.
        purpose: the feature that needs it, for the error message; if empty, ``ckptcore.`` and the name.

    Raises:
        MissingDistributionError: the distribution is not installed. The message has the ``pip install`` command.
    """
    for distribution in DISTRIBUTIONS:
        module = distribution.names.get(name, distribution.internals.get(name))
        if module is not None:
            break
    else:
        raise KeyError(name)
    try:
        imported = importlib.import_module(".".join(filter(None, [distribution.package, module])))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != distribution.package:
            raise
        raise MissingDistributionError(
            f"{purpose or f'ckptcore.{name}'} needs the distribution ckptcore-{distribution.extra}, which is not "
            f"installed: run {distribution.hint}"
        ) from error
    return getattr(imported, name) if module else imported


class ShownInNotebooks:
    """An object that notebooks show as HTML, if the distribution that makes the HTML is installed."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return the HTML; None if the distribution is missing, so that notebooks show the text of `repr`."""
        try:
            to_html = import_name("to_html")
        except MissingDistributionError:
            return None
        assert callable(to_html)
        html: str = to_html(self)
        return html
