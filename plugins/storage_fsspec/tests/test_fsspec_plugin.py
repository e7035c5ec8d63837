"""The plugin's hooks, and the cost of importing it."""

from __future__ import annotations

import socketserver
import threading
from typing import ClassVar

import huggingface_hub
import pytest
from ckptcore_fsspec.plugin import ckpt_storage_for
from ckptcore_testing import PluginTests
from packaging.version import Version

import ckptcore
from ckptcore import Context
from ckptcore.errors import InvalidLocationError, PluginError, StorageError, UnknownPluginError
from ckptcore.plugins import installed_plugins

needs_newer_hub = pytest.mark.skipif(
    Version(huggingface_hub.__version__) < Version("2"), reason="an older huggingface_hub"
)


class TestPluginConforms(PluginTests):
    """Conformance tests of the plugin."""

    entry_point = "fsspec"


def test_the_plugin_opens_schemes_without_another_plugin() -> None:
    for scheme in ("smb", "https", "hf", "sftp", "fsspec+s3", "fsspec+memory", "fsspec+file"):
        assert ckpt_storage_for(scheme) is not None, scheme
        assert installed_plugins().storage(scheme) is ckpt_storage_for(scheme)
    for scheme in ("file", "memory"):
        assert installed_plugins().storage(scheme) is not ckpt_storage_for(scheme)


def test_schemes_are_case_insensitive() -> None:
    with pytest.raises(ckptcore.errors.CheckpointNotFoundError):
        ckptcore.load("FSSPEC+Memory://nothing/here")


@pytest.mark.parametrize("scheme", ["dropbox", "smb"])
def test_the_error_for_a_missing_package_names_it(scheme: str) -> None:
    with pytest.raises(UnknownPluginError, match=f"cannot open {scheme}://: .*not installed: .*[Ii]nstall"):
        ckptcore.load(f"{scheme}://host/directory/checkpoint")


@needs_newer_hub
def test_options_reach_the_file_system() -> None:
    context = Context(storage={"fsspec+file": {"auto_mkdir": True, "no such option": 1}, "hf": {"max_workers": 3}})
    storage = installed_plugins().storage("hf")
    from ckptcore.protocols import StorageOptions

    # The number of workers is visible only on the private connection.
    assert storage("hf://team/model", StorageOptions(config=context.storage["hf"]))._connection.get().max_workers == 3  # type: ignore[attr-defined]


def test_the_error_for_unknown_options_of_a_file_system() -> None:
    context = Context(storage={"fsspec+github": {"unheard": 1}})
    with pytest.raises(PluginError, match=r"does not accept the options .*unheard") as caught:
        ckptcore.load("fsspec+github://team/checkpoint", context=context)
    assert "set Context(storage={'fsspec+github': {...}}) to options in its documentation" in str(caught.value)


class Login(socketserver.StreamRequestHandler):
    """Records the password of an FTP client, and refuses it."""

    passwords: ClassVar[list[str]] = []

    def handle(self) -> None:
        """Answer until the client has sent the password."""
        self.wfile.write(b"220 ready\r\n")
        for line in self.rfile:
            verb, _, argument = line.decode().strip().partition(" ")
            if verb == "PASS":
                self.passwords.append(argument)
            self.wfile.write(b"331 password\r\n" if verb == "USER" else b"530 no\r\n")


def test_passwords_with_characters_of_urls() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Login) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            place = f"127.0.0.1:{server.server_address[1]}/directory"
            with pytest.raises(
                InvalidLocationError, match="pass a password with characters such as / as an option"
            ) as caught:
                ckptcore.load(f"ftp://user:a/b@c@{place}")
            assert "Context(storage={'ftp': {'password': ...}})" in str(caught.value)
            for scheme in ("ftp", "fsspec+ftp"):
                context = Context(storage={scheme: {"password": "a/b@c"}})
                with pytest.raises(StorageError, match="530 no"):
                    ckptcore.load(f"{scheme}://user@{place}", context=context)
        finally:
            server.shutdown()
    assert set(Login.passwords) == {"a/b@c"}, "fsspec takes %2F in a URL as it is"


@pytest.mark.parametrize("url", ["fsspec+simplecache::memory://a/b", "fsspec+zip://a/b::memory://c"])
def test_chained_urls_are_refused(url: str) -> None:
    opener = ckpt_storage_for("fsspec+zip")
    assert opener is not None
    from ckptcore.protocols import StorageOptions

    with pytest.raises(InvalidLocationError):
        opener(url, StorageOptions())


def test_the_error_for_options_that_are_not_json() -> None:
    context = Context(storage={"fsspec+memory": {"token": object()}})  # type: ignore[dict-item]  # that is the mistake
    with pytest.raises(InvalidLocationError, match="JSON"):
        ckptcore.load("fsspec+memory://a/b", context=context)
