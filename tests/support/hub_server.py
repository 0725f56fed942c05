"""The part of the hub's HTTP interface that uploads use, on a port of this machine, so that the real client is heard.

Without hf_xet: files are asked about (preupload), large ones sent as LFS objects, and a commit names them all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

LARGE = (".safetensors",)


@dataclass
class Hub:
    """What the server holds of one repository; ``commits`` is a list of the paths that each one changed."""

    url: str = ""
    is_private: bool | None = None
    refuses: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON for a request."""
        if self.refuses:
            return self.refuses, {"error": "no"}
        if method == "PUT":
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        asked = json.loads(body) if body and "/commit/" not in path else {}
        if path == "/api/repos/create":
            if self.is_private is not None:
                return 409, {"url": f"{self.url}/me/it", "error": "exists"}
            self.is_private = asked.get("visibility", "private" if asked.get("private") else "public") == "private"
            return 200, {"url": f"{self.url}/me/it"}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if path == "/api/models/me/it":
            return 200, {"id": "me/it", "private": self.is_private, "sha": "0" * 40, "siblings": []}
        if "/tree/" in path:
            return 200, [self._entry(name, data) for name, data in self.files.items()]
        if "/preupload/" in path:
            return 200, {"files": [self._mode(each["path"]) for each in asked["files"]]}
        if path.endswith("/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._object(each) for each in asked["objects"]]}
        if "/commit/" in path:
            self._commit([json.loads(line) for line in body.splitlines()])
            return 200, {"commitUrl": f"{self.url}/me/it/commit/1", "commitOid": "1" * 40, "success": True}
        return 404, {"error": f"{method} {path}"}

    def _mode(self, path: str) -> dict[str, Any]:
        return {"path": path, "uploadMode": "lfs" if path.endswith(LARGE) else "regular", "shouldIgnore": False}

    def _object(self, each: dict[str, Any]) -> dict[str, Any]:
        there = each["oid"] in self.objects
        upload = {} if there else {"actions": {"upload": {"href": f"{self.url}/store/{each['oid']}"}}}
        return {"oid": each["oid"], "size": each["size"], **upload}

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": "pointer"}
        if path.endswith(LARGE):
            sha256 = hashlib.sha256(data).hexdigest()
            return entry | {"lfs": {"oid": sha256, "size": len(data), "pointerSize": 130}}
        return entry | {"oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        changed = []
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
            elif key == "deletedFile":
                del self.files[value["path"]]
            if key != "header":
                changed.append(value["path"])
        self.commits.append(sorted(changed))


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub that listens."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, value = hub.answer(self.command, urlsplit(self.path).path, body)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _serve  # noqa: N815

        def log_message(self, *unused: Any) -> None:
            """Nothing: the test says what was asked."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
