"""Environment variables of GCS other than credentials."""

from __future__ import annotations

import pytest
from ckptcore_gcs.settings import settings_of


def test_uploads_are_composed_where_the_environment_says_so() -> None:
    environment = {"CKPTCORE_GCS_UPLOADS": "composite"}
    assert settings_of("bucket", {}, {}).uploads == "parts"
    assert settings_of("bucket", {}, environment).uploads == "composite"
    assert settings_of("bucket", {"uploads": "parts"}, environment).uploads == "parts"
    with pytest.raises(ValueError, match="CKPTCORE_GCS_UPLOADS .* found 'party'"):
        settings_of("bucket", {}, {"CKPTCORE_GCS_UPLOADS": "party"})
