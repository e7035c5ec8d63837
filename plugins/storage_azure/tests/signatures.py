"""Shared access signatures for an account, like those that users create in the portal."""

from __future__ import annotations

import base64
import hashlib
import hmac
from urllib.parse import urlencode

from ckptcore_azure.settings import EMULATOR_ACCOUNT, EMULATOR_KEY


def account_signature(permissions: str = "racwdl") -> str:
    """Return a signature for the blobs of the emulator's account.

    See https://learn.microsoft.com/rest/api/storageservices/create-account-sas.
    """
    fields = {"sv": "2021-06-08", "ss": "b", "srt": "co", "sp": permissions, "se": "2099-01-01T00:00:00Z"}
    names = ("sp", "ss", "srt", "st", "se", "sip", "spr", "sv", "ses")
    lines = [EMULATOR_ACCOUNT, *[fields.get(name, "") for name in names], ""]
    digest = hmac.new(base64.b64decode(EMULATOR_KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
    return urlencode({**fields, "sig": base64.b64encode(digest).decode()})
