"""A server with the protocols of Hugging Face and ModelScope, as their own clients speak them.

`tests/golden/hub/requests.json` has what huggingface_hub 2.4 and modelscope_hub 0.5 asked a server
like this one. Large files lie on a second host of the same server.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

from paddle_vl.files import modelscope

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_MODELSCOPE = "/api/v1/models/org/tiny/repo"


class HubServer:
    """Start it with `with`.

    Attributes:
        files: of org/tiny; names that end in .safetensors are large.
        requests: method, path and status of every request.
        sent: its headers.
        breaks: how many answers with a large file or of ModelScope end after half of the bytes.
        has_ranges: whether requests for a part are honoured.
        committed: files of an upload.
        is_private: what the server says of a repository that was made.
    """

    def __init__(self) -> None:
        self.files = {
            "config.json": b'{"model_type": "qwen3_vl"}',
            "tokenizer.json": b"{}",
            "model.safetensors": bytes(range(256)) * 4096,
            "modeling.py": b"import os",
            "pytorch_model.bin": b"\x80",
        }
        self.requests: list[list] = []
        self.sent: list[dict[str, str]] = []
        self.committed: dict[str, bytes] = {}
        self.breaks, self.has_ranges, self.is_private = 0, True, True

    def __enter__(self) -> "HubServer":
        hub = self

        class Handler(_Handler):
            server_state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.large_address = self.address.replace("127.0.0.1", "localhost")
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A fixture: the environment's hubs are a server here, with caches in `tmp_path`."""
    for variable in ("HF_TOKEN", "HF_HUB_OFFLINE", "PADDLE_VL_HUB", "PADDLE_VL_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    # Its protocol is not recorded.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(modelscope, "sleep", lambda seconds: None)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.address)
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
        yield server


def etag(name: str, data: bytes) -> str:
    """What the hub calls a file's content."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: object = b"", length: int | None = None, **headers: str):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.server_state.requests.append([self.command, self.path, status])
        self.server_state.sent.append(dict(self.headers.items()))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/v1/"):
            return self.modelscope(path)
        for name, status, code in (("gated", 403, "GatedRepo"), ("none", 404, "RepoNotFound")):
            if path.startswith((f"/api/models/org/{name}", f"/org/{name}")):
                return self.reply(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)
        if "no-such" in path:
            return self.reply(404, {"error": ""}, X_Error_Code="RevisionNotFound")
        if path.startswith(("/api/models/org/tiny", "/org/tiny/", "/cdn/")):
            return self.huggingface(path)
        return self.upload(path, body)

    def huggingface(self, path: str) -> None:
        hub = self.server_state
        if "/tree/" in path:
            tree: list[dict] = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(name, data)}
                for name, data in hub.files.items()
            ]
            for entry in tree:
                if entry["path"].endswith(".safetensors"):
                    entry["lfs"] = {"oid": entry["oid"], "size": entry["size"], "pointerSize": 130}
            return self.reply(200, tree)
        if path.startswith("/api/"):
            return self.reply(200, {"id": "org/tiny", "sha": COMMIT, "siblings": []})
        if path.startswith("/cdn/"):
            tags = {etag(name, data): data for name, data in hub.files.items()}
            return self.content(tags[path[5:]], ETag=f'"{path[5:]}"')
        name = path.split("/", 5)[5]
        data = hub.files[name]
        tag = {"X_Repo_Commit": COMMIT, "ETag": f'"{etag(name, data)}"'}
        if not name.endswith(".safetensors"):
            return self.reply(200, data, **tag)
        linked = {"X_Linked_Etag": tag["ETag"], "X_Linked_Size": str(len(data))}
        target = f"{hub.large_address}/cdn/{etag(name, data)}"
        return self.reply(302, Location=target, **tag, **linked)

    def modelscope(self, path: str) -> None:
        hub, query = self.server_state, parse_qs(urlsplit(self.path).query)
        if path.startswith("/api/v1/models/org/gated"):
            return self.reply(403, {"Code": 403, "Success": False, "Message": "no"})
        if not path.startswith(_MODELSCOPE) or query["Revision"] != ["master"]:
            return self.reply(404, {"Code": 404, "Success": False, "Message": "not found"})
        if path == f"{_MODELSCOPE}/files":
            files = [
                {
                    "Path": name,
                    "Type": "blob",
                    "Size": len(data),
                    "Sha256": hashlib.sha256(data).hexdigest(),
                    "Revision": COMMIT,
                }
                for name, data in hub.files.items()
            ]
            return self.reply(200, {"Code": 200, "Success": True, "Data": {"Files": files}})
        name = query["FilePath"][0]
        if name.endswith(".safetensors") and not self.headers["Host"].startswith("localhost"):
            return self.reply(302, Location=hub.large_address + self.path)
        return self.content(hub.files[name])

    def content(self, data: bytes, **headers: str) -> None:
        hub, status = self.server_state, 200
        asked = self.headers.get("Range")
        if asked and hub.has_ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        if hub.breaks:
            hub.breaks -= 1
            self.close_connection = True
            return self.reply(status, data[: len(data) // 2], len(data), **headers)
        return self.reply(status, data, **headers)

    def upload(self, path: str, body: bytes) -> None:
        hub = self.server_state
        if path == "/api/repos/create":
            return self.reply(200, {"url": f"{hub.address}/org/new", "name": "org/new"})
        if path == "/api/models/org/new":
            return self.reply(200, {"id": "org/new", "private": hub.is_private, "siblings": []})
        if "/branch/" in path:
            return self.reply(200, {})
        if "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.reply(200, {"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                put = {"href": f"{hub.address}/put/{each['oid']}", "header": {}}
                each["actions"] = {"upload": put}
            return self.reply(200, {"transfer": "basic", "objects": objects})
        if path.startswith("/put/"):
            hub.committed[path[5:]] = body
            return self.reply(200)
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.committed[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.committed[value["path"]] = hub.committed.pop(value["oid"])
            answer = {"commitOid": COMMIT, "commitUrl": f"{hub.address}/org/new/commit/{COMMIT}"}
            return self.reply(200, {"success": True, **answer})
        return self.reply(404, {"error": "not found"}, X_Error_Code="EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815
