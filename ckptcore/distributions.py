"""The distributions of this project and what each adds: the only file of the core that names them.

Error messages use it to say which ``pip install`` command brings what is missing, and `ckptcore` uses it for names that
other distributions define, such as `ckptcore.copy`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptcore.errors import MissingDistributionError

if TYPE_CHECKING:
    # Type checkers see the lazy names of `ckptcore` here.
    import ckptcore_tiers as tiers  # noqa: TC004  # `__all__` exports the type only
    import ckptcore_transforms as transforms  # noqa: TC004
    from ckptcore_incremental.partial_checkpoint import partial as partial  # noqa: PLC0414
    from ckptcore_incremental.updates import Update as Update  # noqa: PLC0414
    from ckptcore_tools.copies import copy as copy  # noqa: PLC0414
    from ckptcore_tools.copies import copy_steps as copy_steps  # noqa: PLC0414
    from ckptcore_tools.dry_run import plan as plan  # noqa: PLC0414
    from ckptcore_tools.exports import Export as Export  # noqa: PLC0414
    from ckptcore_tools.exports import StepExport as StepExport  # noqa: PLC0414
    from ckptcore_tools.exports import StepExports as StepExports  # noqa: PLC0414
    from ckptcore_tools.exports import WithExports as WithExports  # noqa: PLC0414

__all__ = ["DISTRIBUTIONS", "Distribution", "import_name", "install_hint", "installed_names", "lazy_names"]

if TYPE_CHECKING:
    __all__ += ["tiers", "transforms"]


_EMPTY: Final[Mapping[str, str]] = {}


class Distribution(NamedTuple):
    """A distribution, and what a checkpoint or a program may need it for.

    Attributes:
        extra: the extra of `ckptcore` that installs it; ``pip install 'ckptcore[extra]'``.
        package: its import package.
        names: attributes of `ckptcore` that it defines, each with the module of `package` that has it. A name with
            an empty module is the module `package` itself.
        internals: functions that the core calls if it is installed, each with the module of `package` that has it.
        types: top-level packages whose types it handles.
        schemes: URL schemes that it opens.
        layouts: names of layouts that it reads and writes.
    """

    extra: str
    package: str
    names: Mapping[str, str] = _EMPTY
    internals: Mapping[str, str] = _EMPTY
    types: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        """The command that installs it."""
        return f"pip install 'ckptcore[{self.extra}]'"


DISTRIBUTIONS: Final = (
    Distribution("jax", "ckptcore_jax", types=("flax", "jax", "jaxlib")),
    Distribution("torch", "ckptcore_torch", types=("torch",)),
    Distribution("s3", "ckptcore_s3", schemes=("s3",)),
    Distribution("gcs", "ckptcore_gcs", schemes=("gcs", "gs")),
    Distribution("dcp", "ckptcore_dcp", layouts=("dcp", "torch")),
    Distribution("orbax", "ckptcore_orbax", layouts=("ocdbt", "zarr", "zarr3")),
    Distribution("fsspec", "ckptcore_fsspec", schemes=("abfs", "az", "hdfs", "http", "https", "sftp")),
    Distribution("ray", "ckptcore_ray"),
    Distribution("incremental", "ckptcore_incremental", names={"Update": "updates", "partial": "partial_checkpoint"}),
    Distribution("testing", "ckptcore_testing"),
    Distribution("tiers", "ckptcore_tiers", names={"tiers": ""}),
    Distribution("transforms", "ckptcore_transforms", names={"transforms": ""}),
    Distribution(
        "tools",
        "ckptcore_tools",
        names={
            "copy": "copies",
            "copy_steps": "copies",
            "plan": "dry_run",
            **dict.fromkeys(("Export", "StepExport", "StepExports", "WithExports"), "exports"),
        },
        internals={"main": "cli"},
    ),
)


def install_hint(*, type_: str = "", scheme: str = "", layout: str = "") -> str:
    """Return the command that adds support for a type's package, a URL scheme or a layout; empty if none is known."""
    for distribution in DISTRIBUTIONS:
        if (
            (type_ and type_ in distribution.types)
            or (scheme and scheme in distribution.schemes)
            or (layout and layout in distribution.layouts)
        ):
            return distribution.hint
    return ""


def lazy_names() -> Mapping[str, Distribution]:
    """Return the attributes of `ckptcore` that other distributions define, with their distributions."""
    return {name: distribution for distribution in DISTRIBUTIONS for name in distribution.names}


def installed_names() -> Sequence[str]:
    """Return the lazy names whose distributions are installed. Imports none of them."""
    return [name for name, distribution in lazy_names().items() if _is_installed(distribution.package)]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # raised by import finders that block a package
        return False


def import_name(name: str, *, purpose: str = "") -> object:
    """Import what another distribution defines: an attribute of `ckptcore`, or a function that the core calls.

    Args:
        name: its name in the table.
        purpose: what needs it, for the error message; empty: the attribute of that name.

    Raises:
        MissingDistributionError: if that distribution is not installed; the message has its ``pip install`` command.
    """
    for distribution in DISTRIBUTIONS:
        inside = distribution.names.get(name, distribution.internals.get(name))
        if inside is not None:
            break
    else:
        raise KeyError(name)
    try:
        imported = importlib.import_module(".".join(filter(None, [distribution.package, inside])))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != distribution.package:
            raise
        raise MissingDistributionError(
            f"{purpose or f'ckptcore.{name}'} needs the distribution ckptcore-{distribution.extra}, which is not "
            f"installed: run {distribution.hint}"
        ) from error
    return getattr(imported, name) if inside else imported
