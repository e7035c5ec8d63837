"""The hook of the plugin. fsspec is imported when it is first asked about a scheme that no plugin names."""

from __future__ import annotations

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageOpener

__all__ = ["ckpt_storage_for"]


@hookimpl
def ckpt_storage_for(scheme: str) -> StorageOpener | None:
    """What opens URLs of a scheme that fsspec knows, or of ``fsspec+`` and such a scheme."""
    from ckptcore_fsspec.opening import open_url, opens

    return open_url if opens(scheme) else None
