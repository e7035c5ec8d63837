"""The plugin's hooks, and the cost of importing it."""

from __future__ import annotations

import pytest
from ckptcore_fsspec.plugin import ckpt_storage_for
from ckptcore_testing import PluginTests

import ckptcore
from ckptcore import Context
from ckptcore.errors import InvalidLocationError, PluginError, UnknownPluginError
from ckptcore.plugins import installed_plugins


class TestPluginConforms(PluginTests):
    """The plugin as a whole."""

    entry_point = "fsspec"


def test_it_opens_what_nobody_names() -> None:
    for scheme in ("az", "https", "hf", "sftp", "fsspec+s3", "fsspec+memory", "fsspec+file"):
        assert ckpt_storage_for(scheme) is not None, scheme
        assert installed_plugins().storage(scheme) is ckpt_storage_for(scheme)
    for scheme in ("file", "memory"):
        assert installed_plugins().storage(scheme) is not ckpt_storage_for(scheme)


def test_a_location_of_fsspec_is_spelt_in_any_case() -> None:
    with pytest.raises(ckptcore.errors.CheckpointNotFoundError):
        ckptcore.load("FSSPEC+Memory://nothing/here")


@pytest.mark.parametrize("scheme", ["dropbox", "smb"])
def test_a_package_that_is_missing_is_named(scheme: str) -> None:
    with pytest.raises(UnknownPluginError, match=f"cannot open {scheme}://: .*not installed: .*[Ii]nstall"):
        ckptcore.load(f"{scheme}://host/directory/checkpoint")


def test_options_reach_the_file_system() -> None:
    context = Context(storage={"fsspec+file": {"auto_mkdir": True, "no such option": 1}, "hf": {"max_workers": 3}})
    storage = installed_plugins().storage("hf")
    from ckptcore.protocols import StorageOptions

    # the test looks inside
    assert storage("hf://team/model", StorageOptions(config=context.storage["hf"]))._connection.get().max_workers == 3  # type: ignore[attr-defined]


def test_options_that_a_file_system_does_not_take_are_told() -> None:
    context = Context(storage={"fsspec+github": {"unheard": 1}})
    with pytest.raises(PluginError, match=r"does not accept the options .*unheard"):
        ckptcore.load("fsspec+github://team/checkpoint", context=context)


@pytest.mark.parametrize("url", ["fsspec+simplecache::memory://a/b", "fsspec+zip://a/b::memory://c"])
def test_chained_urls_are_refused(url: str) -> None:
    opener = ckpt_storage_for("fsspec+zip")
    assert opener is not None
    from ckptcore.protocols import StorageOptions

    with pytest.raises(InvalidLocationError):
        opener(url, StorageOptions())


def test_options_that_are_no_json_are_told() -> None:
    context = Context(storage={"fsspec+memory": {"token": object()}})  # type: ignore[dict-item]  # that is the mistake
    with pytest.raises(InvalidLocationError, match="JSON"):
        ckptcore.load("fsspec+memory://a/b", context=context)
