"""Hooks of the Azure plugin. obstore and azure-identity are imported when a container is first used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from ckptcore.errors import InvalidLocationError
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from ckptcore.redaction import redacted_location

if TYPE_CHECKING:
    from ckptcore_azure.containers import AzureContainers

_SCHEMES: Final = ("abfs", "abfss", "az", "azure")
_OLD_SCHEMES: Final = ("wasb", "wasbs")


class AzurePlugin:
    """Opens ``az://container/directory``. Also accepts the spellings of Hadoop and fsspec. Thread-safe."""

    def __init__(self) -> None:
        """Initialise without opening a container."""
        self._containers: AzureContainers | None = None

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Return the openers by scheme."""
        return {scheme: partial(self._open, scheme) for scheme in _SCHEMES}

    @hookimpl
    def ckpt_storage_for(self, scheme: str) -> StorageOpener | None:
        """Return an opener for the old spellings of Hadoop. It raises an error that names the URL to use."""
        return _refuse if scheme in _OLD_SCHEMES else None

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open a directory of a container. Makes no request."""
        return self._open(url.partition("://")[0].lower(), url, options)

    def _open(self, scheme: str, url: str, options: StorageOptions) -> StorageBackend:
        from ckptcore_azure.containers import AzureContainers

        if self._containers is None:
            self._containers = AzureContainers()
        return self._containers.open(scheme, url, options)


def _refuse(url: str, options: StorageOptions) -> StorageBackend:
    container, _, host = url.partition("://")[2].partition("/")[0].partition("@")
    same = f"abfss://{container}@{host.replace('.blob.', '.dfs.', 1) or 'ACCOUNT.dfs.core.windows.net'}/"
    raise InvalidLocationError(f"cannot open {redacted_location(url)!r}: begin the URL with {redacted_location(same)}")


PLUGIN: Final = AzurePlugin()
"""The entry point. It keeps connections open until the process ends."""
