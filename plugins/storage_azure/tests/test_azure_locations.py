"""Which account, endpoint and credential URLs, options and variables select, and which of them are refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from ckptcore_azure.plugin import AzurePlugin
from ckptcore_azure.settings import EMULATOR_KEY, Settings, settings_of
from ckptcore_obstore.storage import ObjectStoreDirectory

from ckptcore.errors import InvalidLocationError
from ckptcore.model import JSON
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageOptions

KEY = EMULATOR_KEY
EMULATOR = "http://127.0.0.1:10000/devstoreaccount1"
TEAM = "https://team.blob.core.windows.net"
CHINA = "https://team.blob.core.chinacloudapi.cn"
CONNECTION = f"DefaultEndpointsProtocol=https;AccountName=team;AccountKey={KEY};EndpointSuffix=core.windows.net"


def _settings(
    options: Mapping[str, JSON], environment: Mapping[str, str], host: str = ""
) -> tuple[str, str, tuple[str, str] | None]:
    settings: Settings = settings_of("box", options, host=host, environment=environment)
    credential = settings.credential
    return settings.account, settings.endpoint, None if credential is None else (credential.kind, credential.secret)


@pytest.mark.parametrize("scheme", ["abfs", "abfss", "az", "azure"])
@pytest.mark.parametrize("host", ["", "@team.dfs.core.windows.net", "@team.blob.core.windows.net"])
def test_urls(scheme: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "team")
    storage = installed_plugins().storage(scheme)(f"{scheme}://box{host}/runs/1", StorageOptions(config={}))
    assert isinstance(storage, ObjectStoreDirectory)
    assert repr(storage) == f"ObjectStoreDirectory('{scheme}://box{host}/runs/1/')", (
        "errors name the URL as it was given"
    )
    assert storage.bucket.service.bucket_url == f"{TEAM}/box"


@pytest.mark.parametrize(
    ("options", "environment", "host", "expected"),
    [
        ({"account_name": "team"}, {}, "", ("team", TEAM, None)),
        ({"account_key": KEY}, {}, "team.dfs.core.windows.net", ("team", TEAM, ("key", KEY))),
        ({"connection_string": CONNECTION}, {}, "", ("team", TEAM, ("key", KEY))),
        ({"account_name": "team", "sas_token": "?sv=1&sig=a%2Fb"}, {}, "", ("team", TEAM, ("sas", "sv=1&sig=a%2Fb"))),
        ({"account_name": "team", "sas_token": f"{TEAM}/box?sv=1&sig=x"}, {"AZURE_STORAGE_KEY": "not Base64"}, "",
         ("team", TEAM, ("sas", "sv=1&sig=x"))),
        ({"account_name": "team", "access_token": "t"}, {}, "", ("team", TEAM, ("token", "t"))),
        ({"account_name": "team", "anonymous": True}, {"AZURE_STORAGE_KEY": KEY}, "",
         ("team", TEAM, ("anonymous", ""))),
        ({"endpoint": "https://team.blob.core.chinacloudapi.cn/"}, {}, "",
         ("team", CHINA, None)),
        ({}, {}, "team.dfs.core.chinacloudapi.cn", ("team", CHINA, None)),
        ({"account_name": "team", "connection_string": "BlobEndpoint=https://a.test/;SharedAccessSignature=sig=x"}, {},
         "", ("team", "https://a.test", ("sas", "sig=x"))),
        ({"use_emulator": True}, {}, "", ("devstoreaccount1", EMULATOR, ("key", KEY))),
        ({"connection_string": "UseDevelopmentStorage=true"}, {}, "", ("devstoreaccount1", EMULATOR, ("key", KEY))),
        ({"use_emulator": True, "endpoint": "http://127.0.0.1:9/devstoreaccount1"}, {}, "",
         ("devstoreaccount1", "http://127.0.0.1:9/devstoreaccount1", ("key", KEY))),
        ({}, {"AZURE_STORAGE_USE_EMULATOR": "true"}, "", ("devstoreaccount1", EMULATOR, ("key", KEY))),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "", ("team", TEAM, ("key", KEY))),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"}, "",
         ("devstoreaccount1", EMULATOR, ("key", KEY))),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": f"BlobEndpoint={TEAM}/;SharedAccessSignature=sv=1&sig=x"}, "",
         ("team", TEAM, ("sas", "sv=1&sig=x"))),
        ({}, {"AZURE_STORAGE_ACCOUNT": "team", "AZURE_STORAGE_KEY": KEY}, "", ("team", TEAM, ("key", KEY))),
        ({}, {"AZURE_STORAGE_ACCOUNT_NAME": "team", "AZURE_STORAGE_SAS_TOKEN": "sig=x"}, "",
         ("team", TEAM, ("sas", "sig=x"))),
        ({"account_name": "team"}, {"AZURE_STORAGE_ACCOUNT_KEY": KEY}, "", ("team", TEAM, ("key", KEY))),
        ({}, {"AZURE_STORAGE_KEY": f" {KEY}\n", "AZURE_STORAGE_CONNECTION_STRING": CONNECTION.replace(KEY, "b3RoZXI=")},
         "", ("team", TEAM, ("key", KEY))),
        ({}, {"AZURE_STORAGE_KEY": KEY, "AZURE_STORAGE_ENDPOINT": TEAM}, "", ("team", TEAM, ("key", KEY))),
        ({}, {"AZURE_STORAGE_KEY": KEY, "AZURE_STORAGE_ENDPOINT": TEAM}, "other.dfs.core.windows.net",
         ("other", "https://other.blob.core.windows.net", None)),
        ({}, {"AZURE_STORAGE_ACCOUNT": "team", "AZURE_STORAGE_KEY": KEY,
              "AZURE_STORAGE_CONNECTION_STRING": CONNECTION.replace("team", "other")}, "",
         ("team", TEAM, ("key", KEY))),
        ({"account_name": "team", "account_key": f"{KEY}\n"}, {}, "", ("team", TEAM, ("key", KEY))),
        ({"account_name": "team", "sas_token": "sv=1&sig=a+b/c=\n"}, {}, "",
         ("team", TEAM, ("sas", "sv=1&sig=a%2Bb/c="))),
        ({"account_name": "devstoreaccount1"}, {"AZURE_STORAGE_USE_EMULATOR": "true"}, "",
         ("devstoreaccount1", EMULATOR, ("key", KEY))),
        ({"endpoint": "http://azurite:10000/devstoreaccount1"}, {"AZURE_STORAGE_USE_EMULATOR": "true"}, "",
         ("devstoreaccount1", "http://azurite:10000/devstoreaccount1", ("key", KEY))),
        ({"endpoint": TEAM}, {"AZURE_STORAGE_USE_EMULATOR": "true"}, "", ("team", TEAM, None)),
        ({}, {"AZURE_STORAGE_USE_EMULATOR": "true"}, "team.dfs.core.windows.net", ("team", TEAM, None)),
        # The key of an account is not sent to another account.
        ({"account_name": "team"}, {"AZURE_STORAGE_ACCOUNT": "other", "AZURE_STORAGE_KEY": KEY}, "",
         ("team", TEAM, None)),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "other.dfs.core.windows.net",
         ("other", "https://other.blob.core.windows.net", None)),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "team.dfs.core.windows.net",
         ("team", TEAM, ("key", KEY))),
        ({}, {"AZURE_STORAGE_ACCOUNT": "team", "AZURE_STORAGE_KEY": KEY}, "team.dfs.core.windows.net",
         ("team", TEAM, ("key", KEY))),
        # The key is not sent to an account of the same name in another cloud, unless a variable or an option selects
        # this cloud.
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "team.dfs.core.chinacloudapi.cn", ("team", CHINA, None)),
        ({}, {"AZURE_STORAGE_ACCOUNT": "team", "AZURE_STORAGE_KEY": KEY}, "team.dfs.core.chinacloudapi.cn",
         ("team", CHINA, None)),
        ({"endpoint": CHINA}, {"AZURE_STORAGE_ACCOUNT": "team", "AZURE_STORAGE_KEY": KEY}, "", ("team", CHINA, None)),
        ({"endpoint": CHINA, "account_name": "team"}, {"AZURE_STORAGE_ACCOUNT": "team", "AZURE_STORAGE_KEY": KEY}, "",
         ("team", CHINA, ("key", KEY))),
        ({}, {"AZURE_STORAGE_ACCOUNT": "team", "AZURE_STORAGE_KEY": KEY, "AZURE_STORAGE_ENDPOINT": f"{CHINA}/"},
         "team.dfs.core.chinacloudapi.cn", ("team", CHINA, ("key", KEY))),
    ],
)  # fmt: skip
def test_account_endpoint_and_credential(
    options: Mapping[str, JSON],
    environment: Mapping[str, str],
    host: str,
    expected: tuple[str, str, tuple[str, str] | None],
) -> None:
    assert _settings(options, environment, host) == expected


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("az://a-b/run", {"account_name": "team"}, f"{TEAM}/a-b"),
        (f"az://{'-'.join('a' * 32)}/run", {"account_name": "team"}, f"{TEAM}/{'-'.join('a' * 32)}"),
        ("az://box@team.z07.blob.storage.azure.net/run", {}, "https://team.z07.blob.storage.azure.net/box"),
        ("az://box@onelake.dfs.fabric.microsoft.com/run", {}, "https://onelake.blob.fabric.microsoft.com/box"),
        ("az://box@team.gateway.example/run", {"endpoint": "http://gateway.example/team"}, "http://gateway.example/team/box"),
    ],
)  # fmt: skip
def test_hosts_and_containers(url: str, options: Mapping[str, JSON], expected: str) -> None:
    storage = AzurePlugin().open(url, StorageOptions(config=options))
    assert isinstance(storage, ObjectStoreDirectory)
    assert storage.bucket.service.bucket_url == expected


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("az://box/run", {}, r"az://box: no storage account is named; set the option 'account_name'"),
        ("az://box@team/run", {}, "invalid container or account; expected a URL such as az://container/directory"),
        ("az:///run", {}, "invalid container or account"),
        ("az://Box/run", {"account_name": "team"}, "invalid container or account"),
        ("https://team.blob.core.windows.net/box", {}, "cannot open"),
        (
            "az://box/run?sv=1&sig=hidden",
            {"account_name": "team"},
            "the URL contains a shared access signature; set it",
        ),
        ("az://box/run", {"endpoint": f"{TEAM}?sig=hidden"}, "the endpoint contains credentials"),
        ("az://box/run", {"endpoint": "https://me:hidden@team.example"}, "the endpoint contains credentials"),
        ("az://box/run", {"endpoint": "team.blob.core.windows.net"}, "not a service URL"),
        ("az://box/run", {"acount_name": "team"}, "unknown option 'acount_name'; did you mean 'account_name'?"),
        ("az://box/run", {"account_name": "team", "account_key": "hidden"}, "'team': the key is not in Base64"),
        ("az://box/run", {"account_name": "team", "sas_token": "hidden"}, "'team': the .* signature has no part sig="),
        ("az://box/run", {"connection_string": "hidden"}, "the connection string is invalid"),
        ("az://box/run", {"account_key": KEY, "sas_token": "sig=hidden"}, "set only one of account_key, sas_token"),
        ("az://box@team.dfs.core.windows.net/run", {"account_name": "other"}, "but the URL names 'team'"),
        ("az://box/run", {"account_name": "other", "connection_string": CONNECTION}, "account 'team', but .*'other'"),
        (
            "az://box/run",
            {"account_name": "team", "connection_string": f"BlobEndpoint={EMULATOR};SharedAccessSignature=sig=hidden"},
            "account 'devstoreaccount1', but .*'team'",
        ),
        (
            "az://box/run",
            {"account_name": "team", "connection_string": "UseDevelopmentStorage=true"},
            "account 'devstoreaccount1', but .*'team'",
        ),
        (
            "az://box@other.dfs.core.windows.net/run",
            {"connection_string": f"BlobEndpoint={TEAM}/;SharedAccessSignature=sv=1&sig=hidden"},
            "account 'team', but the URL or the option 'account_name' names 'other'",
        ),
        ("az://box@team.evil.example/run", {"sas_token": "sig=hidden"}, "'team.evil.example' is no host of Azure.*set"),
        ("az://box@team.dfs.core.windows.net.evil.example/run", {}, "is no host of Azure"),
        ("az://box@team.queue.core.windows.net/run", {}, "is no host of Azure"),
        ("az://box/run", {"account_name": "Team"}, "account_name is 'Team'; expected 3 to 24 lower-case letters and"),
        ("az://box/run", {"account_name": f"{TEAM}?sig=hidden"}, "account_name is 'https://team.*expected 3 to 24"),
        ("az://$root/run", {"account_name": "team"}, "invalid container or account"),
        ("az://a-/run", {"account_name": "team"}, "invalid container or account"),
        (f"az://{'a-' * 32}/run", {"account_name": "team"}, "invalid container or account"),
        (f"az://{'-'.join('a' * 33)}/run", {"account_name": "team"}, "invalid container or account"),
    ],
)
def test_invalid_urls_and_options_are_refused(
    url: str, options: Mapping[str, JSON], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((InvalidLocationError, ValueError), match=message) as caught:
        AzurePlugin().open(url, StorageOptions(config=options))
    assert "hidden" not in str(caught.value) and KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("a./b", "drops a dot at the end"),
        ("a\\b", "turns a backslash into a slash"),
        ("/".join("a" * 254), "254 names between slashes, found 255"),
        ("a" * 972, "975 characters .* found 976"),
    ],
)
def test_keys_that_azure_would_change_are_refused(key: str, rule: str) -> None:
    """There is no server, because the storage sends no request for such a key."""
    options = StorageOptions(config={"account_name": "team", "endpoint": "http://127.0.0.1:9", "anonymous": True})
    storage = AzurePlugin().open("az://box/run", options)
    for call in (lambda: storage.put(key, b""), lambda: storage.open_new(key), lambda: storage.delete([key])):
        with pytest.raises(InvalidLocationError, match=f"invalid key 'run/a.*in az://box: Azure .*{rule}.*; save with"):
            call()
    with pytest.raises(InvalidLocationError, match=rule):
        AzurePlugin().open(f"az://box/{key.ljust(976, 'a') if 'aa' in key else key + '/b'}", options)


@pytest.mark.parametrize("scheme", ["wasb", "wasbs"])
def test_errors_for_old_urls_name_the_new_ones(scheme: str) -> None:
    with pytest.raises(InvalidLocationError, match="with abfss://box@team.dfs.core.windows.net/$") as caught:
        installed_plugins().storage(scheme)(f"{scheme}://box@team.blob.core.windows.net/run", StorageOptions(config={}))
    AzurePlugin().open(str(caught.value).rpartition(" ")[2] + "run", StorageOptions(config={}))


def test_settings_show_no_secret() -> None:
    for options in ({"account_key": KEY}, {"sas_token": "sig=hidden"}, {"access_token": "hidden"}):
        shown = repr(settings_of("box", {"account_name": "team", **options}, environment={"AZURE_X": "hidden"}))
        assert KEY not in shown and "hidden" not in shown
