"""Settings of a container, from its URL, the Context and the environment variables of Azure's tools."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from ckptcore_obstore.options import Option, check_options, flag, text, tuning_of, tuning_options
from ckptcore_obstore.services import Tuning

from ckptcore.errors import InvalidLocationError
from ckptcore.model import JSON
from ckptcore.redaction import redacted_location
from ckptcore_azure.credentials import ANONYMOUS, Credential

EMULATOR_ACCOUNT: Final = "devstoreaccount1"
EMULATOR_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_EMULATOR_URL: Final = f"http://127.0.0.1:10000/{EMULATOR_ACCOUNT}"
"""URL of every emulator's account: https://learn.microsoft.com/azure/storage/common/storage-connect-azurite"""

_SUFFIX: Final = "core.windows.net"
_NAME: Final = re.compile(r"[a-z0-9]{3,24}")
_NAME_EXAMPLE: Final = "team"
_OF_AZURE: Final = ("AZURE_", "IDENTITY_", "IMDS_", "MSI_", "HOME")
_ACCOUNT: Final = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
_KEY: Final = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY")
_KINDS: Final = ("account_key", "sas_token", "access_token", "connection_string", "anonymous")

OPTIONS: Final[Mapping[str, Option]] = {
    "account_name": text("name of the storage account"),
    "account_key": text("key of the storage account"),
    "sas_token": text("shared access signature; it is not renewed"),
    "access_token": text("an OAuth 2.0 token; it is not renewed"),
    "connection_string": text("connection string of the storage account"),
    "anonymous": flag("make requests without credentials, for public containers"),
    "endpoint": text("URL of the account's blob service; plain HTTP needs http:// here"),
    "use_emulator": flag("use the emulator Azurite, at `endpoint` or http://127.0.0.1:10000/devstoreaccount1"),
    **tuning_options(),
}
"""The options of ``Context(storage={"az": {...}})`` by name.

``azure``, ``abfs`` and ``abfss`` have the same options.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a container.

    Attributes:
        container: name of the container.
        url: URL of the container, for messages.
        account: name of the storage account.
        endpoint: URL of the account's blob service, without ``/`` at the end.
        credential: the credential; None for tokens that azure-identity finds.
        tuning: tuning of requests.
        environment: the variables that azure-identity reads. They are part of the settings, so a
            change of them opens the container again.
    """

    container: str
    url: str
    account: str
    endpoint: str
    credential: Credential | None
    tuning: Tuning
    environment: frozenset[tuple[str, str]] = field(repr=False)


def settings_of(
    container: str,
    config: Mapping[str, JSON],
    *,
    scheme: str = "az",
    host: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Return the settings of a container. Makes no request and reads no file.

    The URL takes precedence over options, and options take precedence over the environment.
    Credentials of the environment are used if the environment names no account, or the account of
    the location. If only the host in a URL names the account, the endpoint must also be that of the
    account in the environment, because another service can have an account of the same name.

    Args:
        container: name of the container.
        config: options of the scheme.
        scheme: scheme of the URL, for messages.
        host: host in the URL, such as ``account.dfs.core.windows.net``; empty if the URL has none.
        environment: environment variables.

    Raises:
        InvalidLocationError: for an invalid endpoint, or without a storage account.
        ValueError: for an unknown option or a wrong type, for several kinds of credentials, for an invalid key or
            signature or connection string, or if the URL, the option ``account_name`` and the connection string name
            different accounts.
    """
    given: Mapping[str, Any] = check_options(scheme, config, OPTIONS)
    named = f"Context(storage={{{scheme!r}: ...}})"
    kinds = [name for name in _KINDS if given.get(name)]
    if len(kinds) > 1:
        raise ValueError(f"{named}: set only one of {', '.join(kinds)}")
    account = _named_account(given, host, named)
    connection = _connection(given["connection_string"], named) if given.get("connection_string") else {}
    is_local = connection.get("usedevelopmentstorage", "").lower() == "true"
    of_string = EMULATOR_ACCOUNT if is_local else _account_of_string(connection)
    if of_string and account not in ("", of_string):
        raise ValueError(
            f"{named}: the connection string is that of the storage account {of_string!r}, but the URL or the option "
            f"'account_name' names {account!r}"
        )
    ambient = _of_environment(environment)
    is_named = (account or _account_of(given.get("endpoint") or "")) in ("", EMULATOR_ACCOUNT) and not host
    emulates = given.get("use_emulator", ambient.emulates and is_named)
    if emulates or is_local:
        account = account or EMULATOR_ACCOUNT
        place = (ambient.endpoint if ambient.emulates else "") or _EMULATOR_URL
        connection = {"accountkey": EMULATOR_KEY, "blobendpoint": place, **connection}
    account = account or of_string
    of_host = "https://" + host.replace(".dfs.", ".blob.", 1)
    endpoint = given.get("endpoint") or (of_host if host else connection.get("blobendpoint", ""))
    credential = _given_credential(given, connection)
    if not account and not endpoint:
        account, endpoint = ambient.account, ambient.endpoint
    is_found = ambient.account in ("", account or _account_of(endpoint))
    if ambient.account and (host or not account):  # a URL names the account, perhaps for another service
        is_found = is_found and endpoint.rstrip("/") == (ambient.endpoint or _endpoint_of(ambient.account)).rstrip("/")
    account = account or _account_of(endpoint)
    if credential is None and not kinds and is_found:
        credential = ambient.credential
    if not account:
        raise InvalidLocationError(
            f"cannot open {scheme}://{container}: no storage account is named; set the option 'account_name' or "
            f"AZURE_STORAGE_ACCOUNT_NAME, or use a URL such as abfss://{container}@ACCOUNT.dfs.{_SUFFIX}/directory"
        )
    if credential is not None and (wrong := _wrong(credential)):
        raise ValueError(f"{named}, or the environment, for the storage account {account!r}: {wrong}")
    if not endpoint and ambient.account == account:
        endpoint = ambient.endpoint
    endpoint = endpoint or _endpoint_of(account, connection)
    return Settings(
        container=container,
        url=f"{scheme}://{container}@{host}" if host else f"{scheme}://{container}",
        account=account,
        endpoint=_checked_endpoint(endpoint),
        credential=credential,
        tuning=tuning_of(given),
        environment=frozenset([(name, value) for name, value in environment.items() if name.startswith(_OF_AZURE)]),
    )


def _named_account(given: Mapping[str, Any], host: str, named: str) -> str:
    """Return the account that the URL or the option names. Empty if neither names one."""
    account = host.partition(".")[0]
    if account and given.get("account_name") not in (None, "", account):
        raise ValueError(f"{named}: account_name is {given['account_name']!r}, but the URL names {account!r}")
    account = account or given.get("account_name", "")
    if not _NAME.fullmatch(account or _NAME_EXAMPLE):
        raise ValueError(
            f"{named}: account_name is {redacted_location(account)!r}; expected 3 to 24 lower-case letters and digits, "
            f"such as {_NAME_EXAMPLE} for https://{_NAME_EXAMPLE}.blob.{_SUFFIX}"
        )
    return account


def _account_of_string(connection: Mapping[str, str]) -> str:
    """Return the account of a connection string. Empty if it names none and its endpoint does not show the account."""
    account, blobs = connection.get("accountname", ""), connection.get("blobendpoint", "")
    if not account and (".blob." in blobs or _is_address(urlsplit(blobs).hostname or "")):
        return _account_of(blobs)
    return account


@dataclass(frozen=True, slots=True)
class _Environment:
    """Settings of one storage account in the environment. See `Settings`."""

    account: str = ""
    endpoint: str = ""
    credential: Credential | None = None
    emulates: bool = False


def _of_environment(environment: Mapping[str, str]) -> _Environment:
    account = next((environment[name] for name in _ACCOUNT if environment.get(name)), "")
    endpoint = environment.get("AZURE_STORAGE_ENDPOINT", "")
    emulates = environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
    key = next((environment[name] for name in _KEY if environment.get(name)), "")
    credential = Credential("key", key.strip()) if key else None
    if not key and (signature := environment.get("AZURE_STORAGE_SAS_TOKEN")):
        credential = _signature(signature)
    text_of_all = environment.get("AZURE_STORAGE_CONNECTION_STRING")
    if text_of_all and (credential is None or not account):
        connection = _connection(text_of_all, "AZURE_STORAGE_CONNECTION_STRING")
        if connection.get("usedevelopmentstorage", "").lower() == "true":
            emulates = emulates or credential is None
        else:
            name = connection.get("accountname", "") or _account_of(connection.get("blobendpoint", ""))
            account = name or account
            endpoint = endpoint or connection.get("blobendpoint") or (_endpoint_of(name, connection) if name else "")
            credential = credential or _given_credential({}, connection)
    return _Environment(account or _account_of(endpoint), endpoint, credential, emulates)


def _endpoint_of(account: str, connection: Mapping[str, str] = {}) -> str:
    protocol = connection.get("defaultendpointsprotocol", "https")
    return f"{protocol}://{account}.blob.{connection.get('endpointsuffix', _SUFFIX)}"


def _given_credential(given: Mapping[str, Any], connection: Mapping[str, str]) -> Credential | None:
    """Return the credential of the options or of a connection string."""
    if given.get("anonymous"):
        return ANONYMOUS
    if given.get("access_token"):
        return Credential("token", given["access_token"])
    if signature := given.get("sas_token") or connection.get("sharedaccesssignature"):
        return _signature(signature)
    if key := given.get("account_key") or connection.get("accountkey"):
        return Credential("key", key.strip())
    return None


def _connection(connection: str, named: str) -> dict[str, str]:
    """Parse a connection string. Names are in lower case."""
    values: dict[str, str] = {}
    for part in connection.strip().strip('"').split(";"):
        name, equals, value = part.partition("=")
        if part.strip() and not equals:
            raise ValueError(f"{named}: the connection string is invalid; expected NAME=VALUE;... of the Azure portal")
        if value:
            values[name.strip().lower()] = value.strip()
    return values


def _signature(text: str) -> Credential:
    """Return a credential for a shared access signature. The portal also shows it as the query of a URL.

    A plus sign belongs to the Base64 of a signature. In a query it would mean a space, so it is
    escaped.
    """
    return Credential("sas", text.strip().rpartition("?")[2].replace("+", "%2B"))


def _wrong(credential: Credential) -> str | None:
    """Return the problem of a credential as text that does not show it, or None if it is valid."""
    if credential.kind == "sas" and not dict(parse_qsl(credential.secret)).get("sig"):
        return "the shared access signature has no part sig=...; expected one such as sv=...&sig=..."
    try:
        base64.b64decode(credential.secret if credential.kind == "key" else "", validate=True)
    except (binascii.Error, ValueError):
        return "the key is not in Base64"
    return None


def _account_of(endpoint: str) -> str:
    """Return the account in the URL of a blob service: the first path part, or else the first label of the host."""
    parts = urlsplit(endpoint)
    host, path = parts.hostname or "", parts.path.strip("/")
    return path.partition("/")[0] or ("" if _is_address(host) else host.partition(".")[0])


def _is_address(host: str) -> bool:
    return host == "localhost" or host.replace(".", "").isdigit()


def _checked_endpoint(endpoint: str) -> str:
    endpoint = endpoint.rstrip("/")
    parts = urlsplit(endpoint)
    if "@" in parts.netloc or parts.query:
        # Refuse such an endpoint, because errors and addresses show it. This message does not show it.
        raise InvalidLocationError("the endpoint contains credentials; set them with their own options")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.fragment:
        raise InvalidLocationError(
            f"the endpoint {endpoint!r} is not a service URL; expected one such as https://account.blob.{_SUFFIX}"
        )
    return endpoint
