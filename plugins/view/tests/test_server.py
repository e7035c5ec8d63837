"""The server: access control and answers."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from ckptcore_view.command import _redirect
from ckptcore_view.documents import Document
from ckptcore_view.server import ViewServer, application
from ckptcore_view.viewed import Viewed
from starlette.testclient import TestClient

import ckptcore
from ckptcore.context import default_context
from plugins.view.tests.conftest import damage

TOKEN = "a-token"


@pytest.fixture
def client(checkpoint: Path) -> TestClient:
    viewed = Viewed(str(checkpoint), default_context())
    return TestClient(application(viewed, TOKEN), base_url="http://127.0.0.1:8000")


def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get(f"/{TOKEN}/")
    assert page.status_code == 200
    assert "{{" not in page.text
    imports = json.loads(page.text.partition("importmap")[2].partition(">")[2].partition("</script>")[0])["imports"]
    for address in [*imports.values(), "style.css"]:
        assert client.get(f"/{TOKEN}/{address}").status_code == 200


def test_every_script_is_allowed_by_a_new_nonce(client: TestClient) -> None:
    pages = [client.get(f"/{TOKEN}/") for _ in range(2)]
    for page in pages:
        policy = page.headers["content-security-policy"]
        nonce = policy.partition("'nonce-")[2].partition("'")[0]
        assert page.text.count("<script") == page.text.count(f'nonce="{nonce}"') == 2
        assert "unsafe-eval" not in policy
        assert "default-src 'none'" in policy
    assert pages[0].headers["content-security-policy"] != pages[1].headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/", "/other/", "/other/documents/view", "/other/app.js", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/documents/view",
        f"/{TOKEN}/server.py", f"/{TOKEN}/../server.py", f"/{TOKEN}/..%2fserver.py", f"/{TOKEN}/index.html",
        f"/{TOKEN}/documents/", f"/{TOKEN}/%2e%2e/pyproject.toml",
    ],
)  # fmt: skip
def test_other_paths_are_not_found(path: str, client: TestClient) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::1]"])
def test_other_hosts_are_refused(host: str, client: TestClient) -> None:
    assert client.get(f"/{TOKEN}/documents/view", headers={"Host": host}).status_code == 400


def test_pages_are_not_cached_and_send_no_referrer(client: TestClient) -> None:
    for path in ("", "app.js", "documents/view"):
        headers = client.get(f"/{TOKEN}/{path}").headers
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("document", "status", "text"),
    [
        ("array?at=&leaf=x", 400, "expected a number"),
        ("nothing", 400, "no document"),
        ("tree?at=../..", 404, "has no"),
        ("array?at=&leaf=99", 404, "no array"),
    ],
)
def test_errors_are_documents(document: str, status: int, text: str, client: TestClient) -> None:
    answer = client.get(f"/{TOKEN}/documents/{document}")
    assert answer.status_code == status
    assert text in answer.json()["error"]


def test_damage_is_an_error(checkpoint: Path, client: TestClient) -> None:
    damage(checkpoint / "model.safetensors")
    answer = client.get(f"/{TOKEN}/documents/statistics?at=&leaf=7")
    assert answer.status_code == 500
    assert "model.safetensors" in answer.json()["error"]


def test_only_get_is_allowed(client: TestClient) -> None:
    assert client.post(f"/{TOKEN}/documents/view").status_code == 405


def test_a_running_server(checkpoint: Path) -> None:
    with ViewServer(Viewed(str(checkpoint), default_context())) as server:
        assert server.url.startswith("http://127.0.0.1:")
        with urlopen(f"{server.url}documents/view") as answer:
            assert json.load(answer)["kind"] == "tree"
        with pytest.raises(HTTPError, match="400"):
            urlopen(Request(f"{server.url}documents/view", headers={"Host": "evil.example"}))
    with pytest.raises(OSError, match="refused"):
        urlopen(server.url)


def test_two_servers_have_different_tokens(checkpoint: Path) -> None:
    viewed = Viewed(str(checkpoint), default_context())
    with ViewServer(viewed) as first, ViewServer(viewed) as second:
        assert first.url.split("/")[3] != second.url.split("/")[3]
        assert len(first.url.split("/")[3]) >= 32


def test_names_that_utf8_cannot_encode(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"\ud800x": np.ones(2)})
    client = TestClient(
        application(Viewed(str(tmp_path / "c"), default_context()), TOKEN), base_url="http://127.0.0.1:8000"
    )
    assert client.get(f"/{TOKEN}/documents/tree?at=").json()["names"][1] == "\ud800x"


def test_a_bug_is_reported_in_the_answer_without_a_traceback(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> Document:
        raise RuntimeError("defect")

    monkeypatch.setattr("ckptcore_view.server.document_of", fail)
    answer = client.get(f"/{TOKEN}/documents/view")
    assert answer.status_code == 500
    assert answer.json()["error"] == "RuntimeError: defect. This is a bug in ckptcore: please report it"
    assert capfd.readouterr().err == ""


def test_reads_stop_when_the_server_ends(checkpoint: Path) -> None:
    viewed = Viewed(str(checkpoint), default_context())
    client = TestClient(application(viewed, TOKEN, lambda: True), base_url="http://127.0.0.1:8000")
    assert client.get(f"/{TOKEN}/documents/statistics?at=&leaf=0").status_code == 499


def test_the_browser_gets_the_token_from_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Path] = []
    monkeypatch.setattr("webbrowser.open", lambda url: files.append(Path(url.removeprefix("file://"))))
    with _redirect("http://127.0.0.1:80/a-token/"):
        [file] = files
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "url=http://127.0.0.1:80/a-token/" in file.read_text()
    assert not file.exists()
