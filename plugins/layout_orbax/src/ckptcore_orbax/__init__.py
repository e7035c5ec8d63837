"""Layouts `ocdbt`, `zarr3` and `zarr`, which read and write Orbax checkpoints, and a handler of objects for Orbax.

Saving and loading need no import of this package: ckptcore finds `ckptcore_orbax.plugin` by its
entry point, and ``layout="ocdbt"`` names a layout. To change options, pass a layout object:

    OcdbtLayout   one OCDBT database: ``save(location, state, layout=OcdbtLayout(chunk_bytes=16 << 20))``
    Zarr3Layout   zarr v3 arrays, a file for each shard
    ZarrLayout    zarr v2 arrays, a file for each chunk
    ArrayRule     other options for arrays selected by a pattern

`SavesToDirectoryAsyncHandler` saves and loads objects with the methods that Orbax calls: ``async save(directory)`` and
``async load(directory)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptcore_orbax.orbax.asynchronous_objects import SavesToDirectoryAsyncHandler
    from ckptcore_orbax.orbax.layouts import OcdbtLayout, Zarr3Layout, ZarrLayout
    from ckptcore_orbax.zarr.stored_arrays import ArrayRule

__all__ = ["ArrayRule", "OcdbtLayout", "SavesToDirectoryAsyncHandler", "Zarr3Layout", "ZarrLayout"]


def __getattr__(name: str) -> object:
    # Plugin discovery imports this package, so layouts are imported on first use.
    if name == "ArrayRule":
        from ckptcore_orbax.zarr import stored_arrays

        return stored_arrays.ArrayRule
    if name == "SavesToDirectoryAsyncHandler":
        from ckptcore_orbax.orbax import asynchronous_objects

        return asynchronous_objects.SavesToDirectoryAsyncHandler
    if name in __all__:
        from ckptcore_orbax.orbax import layouts

        return getattr(layouts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
