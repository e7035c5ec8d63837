"""Environment variables of GCS other than credentials."""

from __future__ import annotations

import pytest
from ckptcore_gcs.settings import settings_of

from ckptcore.errors import InvalidLocationError


def test_an_environment_variable_selects_composed_uploads() -> None:
    environment = {"CKPTCORE_GCS_UPLOADS": "composite"}
    assert settings_of("bucket", {}, {}).uploads == "parts"
    assert settings_of("bucket", {}, environment).uploads == "composite"
    assert settings_of("bucket", {"uploads": "parts"}, environment).uploads == "parts"
    with pytest.raises(ValueError, match="CKPTCORE_GCS_UPLOADS .* found 'party'"):
        settings_of("bucket", {}, {"CKPTCORE_GCS_UPLOADS": "party"})


def test_credentials_of_one_kind() -> None:
    with pytest.raises(ValueError, match="set only one of access_token, anonymous"):
        settings_of("bucket", {"access_token": "hidden", "anonymous": True}, {})
    assert settings_of("bucket", {"access_token": "hidden"}, {}).access_token == "hidden"
    assert settings_of("bucket", {"anonymous": True}, {}).anonymous


def test_credentials_in_the_endpoint() -> None:
    with pytest.raises(InvalidLocationError, match="a user or a password; set credentials with their own options"):
        settings_of("bucket", {"endpoint": "https://me:hidden@host"}, {})
    assert settings_of("bucket", {"endpoint": "https://host", "access_token": "hidden"}, {}).access_token == "hidden"
