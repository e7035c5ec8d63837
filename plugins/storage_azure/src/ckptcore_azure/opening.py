"""Opening of URLs. Locations with the same container and settings share one `AzureContainer`."""

from __future__ import annotations

import os
import re
from typing import Final

from ckptcore_obstore.open_buckets import OpenBuckets
from ckptcore_obstore.storage import ObjectStoreDirectory

from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import StorageOptions
from ckptcore.redaction import redacted_location
from ckptcore_azure.containers import AzureContainer
from ckptcore_azure.service import AzureService
from ckptcore_azure.settings import Settings, settings_of

_CONTAINER: Final = re.compile(r"(?=.{3,63}\Z)[a-z0-9](-?[a-z0-9])*|\$web")
"""https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata"""

_HOST: Final = re.compile(r"[a-z0-9]{3,24}(\.[a-z0-9-]+)+")
_CLOUDS: Final = (
    "core.windows.net",
    "core.chinacloudapi.cn",
    "core.usgovcloudapi.net",
    "storage.azure.net",
    "fabric.microsoft.com",
)
_SERVICE: Final = re.compile(rf"[a-z0-9]{{3,24}}(\.z[0-9]{{1,2}})?\.(dfs|blob)\.({'|'.join(map(re.escape, _CLOUDS))})")
"""Hosts that a URL may name. Requests carry credentials, which no other host may get because of a location.

See https://learn.microsoft.com/azure/storage/common/storage-account-overview#storage-account-endpoints.
"""

_EXAMPLES: Final = "az://container/directory or abfss://container@account.dfs.core.windows.net/directory"
_SIGNATURE: Final = re.compile(r"[?&]sig=", re.IGNORECASE)


class AzureContainers:
    """Cache of the containers that this process used last, by settings. Thread-safe."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._containers = OpenBuckets[tuple[int, Settings], AzureContainer]()

    def open(self, scheme: str, url: str, options: StorageOptions) -> ObjectStoreDirectory:
        """Open ``az://CONTAINER/DIRECTORY`` or ``abfss://CONTAINER@HOST/DIRECTORY``. Makes no request.

        Args:
            scheme: ``abfs``, ``abfss``, ``az`` or ``azure``; they mean the same.
            url: the URL.
            options: options of the scheme.

        Raises:
            InvalidLocationError: for an invalid URL or endpoint.
            ValueError: for invalid options; see `settings_of`.
        """
        begins = f"{scheme}://"
        if url[: len(begins)].lower() != begins:
            raise InvalidLocationError(f"cannot open {redacted_location(url)!r}: expected a URL such as {_EXAMPLES}")
        address, _, directory = url[len(begins) :].partition("/")
        name, at, host = address.partition("@")
        if not _CONTAINER.fullmatch(name) or (at and not _HOST.fullmatch(host)):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: invalid container or account; "
                f"expected a URL such as {_EXAMPLES}"
            )
        if _SIGNATURE.search(url):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: the URL contains a shared access signature; set it with the "
                f"option 'sas_token' or AZURE_STORAGE_SAS_TOKEN"
            )
        if at and not _SERVICE.fullmatch(host) and not options.config.get("endpoint"):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: {host!r} is no host of Azure, such as "
                f"account.dfs.core.windows.net, and credentials may be sent to it; if that is right, set the option "
                f"'endpoint' to its URL"
            )
        settings = settings_of(name, options.config, scheme=scheme, host=host)
        owner = os.getpid(), settings  # A forked child cannot use the connections and locks of its parent.
        container = self._containers.get(owner, lambda: AzureContainer(AzureService(settings)))
        return ObjectStoreDirectory(container, directory.rstrip("/"))
