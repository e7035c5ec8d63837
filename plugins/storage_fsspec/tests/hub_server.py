"""A local server with the API of the Hugging Face Hub for reading a repository. The files are in a directory.

It supports the requests of huggingface_hub 0.24 to 2.4: for the repository, its file tree, some of its paths, and
files. The same directory is also a storage bucket, for the requests of huggingface_hub 2.4.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from urllib.parse import parse_qs, unquote

from plugins.storage_fsspec.tests.web_servers import RangesHandler

REPOSITORY = "team/model"
COMMIT = "a" * 40
BUCKET = "team/box"


class HubHandler(RangesHandler):
    """Serves the directory as the repository ``team/model``, and as the bucket ``team/box``."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        matched = re.fullmatch(rf"/api/models/{REPOSITORY}(?:/(revision|tree)/([^/]+)/?(.*))?", path)
        if matched is not None and matched[1] != "tree":
            self._send({"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": [], "private": False})
        elif matched is not None:
            self._tree(matched[3])
        elif (bucket := re.fullmatch(rf"/api/buckets/{BUCKET}(?:/(tree)/?(.*))?", path)) is not None:
            if bucket[1]:
                self._tree(bucket[2])
            else:
                created = "2026-11-29T10:00:00.000Z"
                self._send({"id": BUCKET, "private": False, "createdAt": created, "size": 0, "totalFiles": 0})
        elif (
            resolved := re.fullmatch(rf"/(?:buckets/{BUCKET}/resolve|{REPOSITORY}/resolve/[^/]+)/(.+)", path)
        ) is not None:
            self.path = f"/{resolved[1]}"
            super().do_GET()
        else:
            self._answer(404, b'{"error": "Repository not found"}', **{"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if not re.fullmatch(rf"/api/(models/{REPOSITORY}/paths-info/[^/]+|buckets/{BUCKET}/paths-info)", self.path):
            self._answer(404, b"{}")
            return
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        paths = [Path(self.directory, path) for path in asked if Path(self.directory, path).exists()]
        self._send([self._entry(path) for path in paths])

    def _tree(self, directory: str) -> None:
        top = Path(self.directory, directory)
        if not top.is_dir():
            self._answer(404, b'{"error": "no such entry"}', **{"X-Error-Code": "EntryNotFound"})
            return
        recursive = "recursive=true" in self.path.lower()
        self._send([self._entry(path) for path in sorted(top.rglob("*") if recursive else top.iterdir())])

    def _entry(self, path: Path) -> dict[str, object]:
        relative = path.relative_to(self.directory).as_posix()
        oid = hashlib.sha1(relative.encode()).hexdigest()
        if path.is_dir():
            return {"type": "directory", "path": relative, "oid": oid, "size": 0}
        return {"type": "file", "path": relative, "oid": oid, "size": path.stat().st_size, "xetHash": oid}

    def _send(self, document: object) -> None:
        self._answer(200, json.dumps(document).encode(), **{"Content-Type": "application/json"})
