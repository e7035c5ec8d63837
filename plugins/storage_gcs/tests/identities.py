"""A token service, a metadata server, and files of credentials for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa


class TokenService:
    """A local replacement for https://oauth2.googleapis.com/token and for the metadata server.

    Attributes:
        answer: status and body of the next answers.
        asked: paths of the requests so far.
    """

    def __init__(self, token: str) -> None:
        self.answer: tuple[int, Mapping[str, Any]] = (
            200,
            {"access_token": token, "expires_in": 3600, "token_type": "Bearer"},
        )
        self.asked: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._reply(*service.answer)

            def do_GET(self) -> None:
                if self.path.endswith("/token") or "/token?" in self.path:
                    self._reply(*service.answer)
                else:
                    account = {"email": "a@b", "aliases": [], "scopes": []}
                    self._reply(200, account if "service-accounts" in self.path else "project")

            def _reply(self, status: int, value: object) -> None:
                service.asked.append(self.path)
                body = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(status)
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Type", "application/text" if isinstance(value, str) else "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def host(self) -> str:
        """Return host and port of the service."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def service_account(self, directory: Path) -> Path:
        """Write the file of a service account that gets its tokens from this service. Return the path."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._file(
            directory,
            {
                "type": "service_account",
                "project_id": "project",
                "private_key_id": "1",
                "private_key": pem.decode(),
                "client_email": "account@project.iam.gserviceaccount.com",
                "token_uri": f"http://{self.host}/token",
            },
        )

    def federated(self, directory: Path) -> Path:
        """Write the credentials of a federated identity, which obstore cannot read. Return the path."""
        (directory / "subject").write_text("subject")
        return self._file(
            directory,
            {
                "type": "external_account",
                "audience": "//iam.googleapis.com/projects/1/locations/global/"
                "workloadIdentityPools/pool/providers/provider",
                "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
                "token_url": f"http://{self.host}/token",
                "credential_source": {"file": str(directory / "subject")},
            },
        )

    def _file(self, directory: Path, content: Mapping[str, Any]) -> Path:
        path = directory / "credentials.json"
        path.write_text(json.dumps(content))
        return path
