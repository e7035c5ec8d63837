"""Credentials: those that were given, or what AWS' own conventions find."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from ckptcore_obstore.forks import renew_in_children

from ckptcore.errors import StorageCredentialsError

__all__ = ["ChainCredentials", "CredentialSource", "Credentials", "GivenCredentials", "environment_credentials"]

_KEPT_SECONDS: Final = 60.0
"""How long credentials are used before their source, which refreshes them, is asked again."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What requests are signed with; nothing of it is shown.

    Attributes:
        access_key_id: names the secret.
        secret_access_key: signs.
        token: of a session; empty for keys that last.
    """

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    token: str = field(default="", repr=False)


class CredentialSource(Protocol):
    """Where credentials come from. Any thread."""

    def get(self) -> Credentials:
        """Those to sign with now.

        Raises:
            StorageCredentialsError: if there are none.
        """
        ...


@dataclass(frozen=True, slots=True)
class GivenCredentials:
    """Credentials that stay the same."""

    credentials: Credentials

    def get(self) -> Credentials:
        """They themselves."""
        return self.credentials


class ChainCredentials:
    """What boto3 finds: profiles, SSO, processes, web identity, containers, instances. It refreshes what expires."""

    def __init__(self, profile: str | None) -> None:
        """Look for nothing yet, and do not import boto3."""
        self._profile = profile
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Look for them anew: in a child by fork, whose parent may be asking for them just now."""
        self._lock = threading.Lock()
        self._found: Any = None
        self._kept: tuple[datetime, Credentials] | None = None

    def get(self) -> Credentials:
        """Those to sign with now; the first call may ask the metadata service of an instance."""
        with self._lock:
            now = datetime.now(UTC)
            if self._kept is not None and now < self._kept[0]:
                return self._kept[1]
            if self._found is None:
                self._found = self._find()
            try:
                frozen = self._found.get_frozen_credentials()
            except Exception as error:  # botocore raises what its many sources do
                raise StorageCredentialsError(
                    f"the AWS credentials could not be refreshed: {' '.join(str(error).split())[:300]}. Sign in again, or look "
                    "at the source of the profile"
                ) from error
            credentials = Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")
            self._kept = now + timedelta(seconds=_KEPT_SECONDS), credentials
            return credentials

    def _find(self) -> Any:
        import boto3  # type: ignore[import-untyped]  # it has no annotations
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

        try:
            found = boto3.Session(profile_name=self._profile).get_credentials()
        except BotoCoreError as error:
            raise StorageCredentialsError(
                f"no AWS credentials were found: {' '.join(str(error).split())[:300]}. Look at the variables AWS_... of the "
                "environment, at ~/.aws/config, and at the option 'profile'"
            ) from error
        if found is None:
            raise StorageCredentialsError(
                "no AWS credentials were found: looked at the options, AWS_ACCESS_KEY_ID, the profiles in ~/.aws, web identity, "
                "and the metadata of containers and instances. Set one of them, or Context(storage={'s3': {'anonymous': True}}) "
                "for a public bucket"
            )
        return found


def environment_credentials(environment: Mapping[str, str]) -> Credentials | None:
    """What AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN say, if they do."""
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return None
    return Credentials(key, secret, environment.get("AWS_SESSION_TOKEN", ""))
