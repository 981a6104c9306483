"""A server with the protocols of Hugging Face, ModelScope and AI Studio.

`tests/golden/hub/requests.json` has what huggingface_hub 2.4 and modelscope_hub 0.5 asked a server
like this one. The protocol of AI Studio is not recorded: it is written from the source of its
client, aistudio_sdk 0.3.9, and from the API of Gitea. Large files lie on a second host of the same
server.
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

from paddle_vl.files import plain_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_MODELSCOPE, _CONFIG = "/api/v1/models/org/tiny/repo", b'{"model_type": "qwen3_vl"}'
_AISTUDIO = "/api/v1/repos/org/tiny"


class HubServer(ThreadingHTTPServer):
    """A running server.

    Attributes:
        files: of org/tiny; names that end in .safetensors are large.
        requests, sent: method and path of the answered requests, and their headers.
        breaks: how many of the next large answers end after half of the bytes.
        per_page: most entries of a page of AI Studio's listing.
        states_pointers: whether AI Studio's sizes of large files are those of their pointers, as
            in Gitea itself, which then has the pointer as their content.
        damages: whether contents come with a wrong first byte.
        moved: path prefix to which AI Studio redirects on the same host, as it does first.
        committed: files of an upload.
    """

    daemon_threads, has_ranges, is_private, breaks = True, True, True, 0
    per_page, states_pointers, moved, damages = 1000, False, "/moved", False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.files = {"config.json": _CONFIG, "tokenizer.json": b"{}", "modeling.py": b"import os"}
        self.files |= {"model.safetensors": bytes(range(256)) * 4096, "model.bin": b"\x80"}
        self.requests: list[str] = []
        self.sent: list[dict[str, str]] = []
        self.committed: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A fixture: the environment's hubs are a server here, with caches in `tmp_path`."""
    tokens = ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "AISTUDIO_ACCESS_TOKEN")
    for variable in (*tokens, "HF_HUB_OFFLINE", "PADDLE_VL_HUB", "PADDLE_VL_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    # Its protocol is not recorded.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(plain_hub, "sleep", lambda seconds: None)
    with HubServer() as server:
        for variable in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT", "STUDIO_GIT_HOST"):
            monkeypatch.setenv(variable, server.address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
        monkeypatch.setenv("AISTUDIO_CACHE_HOME", str(tmp_path / "ais"))
        yield server
        server.shutdown()


def _tag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else _git_hash(data)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _in_git(name: str, data: bytes) -> bytes:
    """What Git has of a file: of a large one the pointer of Git LFS."""
    if not name.endswith(".safetensors"):
        return data
    oid = hashlib.sha256(data).hexdigest()
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n".encode()
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: object = b"", length: int | None = None, **headers: str):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if status != 404:
            self.server.requests.append(f"{self.command} {self.path}")
        self.server.sent.append(dict(self.headers.items()))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, files = unquote(urlsplit(self.path).path), self.server.files
        path = path.replace("/api/datasets/", "/api/models/").replace("/datasets/", "/")
        errors = {"gated": (403, "GatedRepo"), "none": (404, "RepoNotFound")}
        errors["no-such"] = (404, "RevisionNotFound")
        for name, (status, code) in errors.items():
            if name in self.path:
                return self.reply(status, {"error": code}, X_Error_Code=code)
        if path.startswith(_MODELSCOPE):
            return self.modelscope(path)
        if self.path.partition("?")[0].removeprefix(self.server.moved).startswith(_AISTUDIO):
            return self.aistudio()
        if path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"path": n, "size": len(d), "oid": _tag(n, d)} for n, d in files.items()]
            lfs = [
                {"lfs": e | {"pointerSize": 1}} if e["path"].endswith("tensors") else {}
                for e in tree
            ]
            return self.reply(
                200, [e | f | {"type": "file"} for e, f in zip(tree, lfs, strict=True)]
            )
        if path.startswith("/org/tiny/resolve/"):
            name = path.split("/", 5)[5]
            tag, data = _tag(name, files[name]), files[name]
            headers = {"X_Repo_Commit": COMMIT, "ETag": f'"{tag}"'}
            if not name.endswith(".safetensors"):
                return self.reply(200, data, **headers)
            headers |= {"X_Linked_Etag": f'"{tag}"', "X_Linked_Size": str(len(data))}
            return self.reply(302, Location=f"{self.large()}/cdn/{tag}", **headers)
        if path.startswith("/cdn/"):
            return self.content({_tag(n, d): d for n, d in files.items()}[path[5:]])
        return self.api(path, body)

    def large(self) -> str:
        return self.server.address.replace("127.0.0.1", "localhost")

    def modelscope(self, path: str) -> None:
        if path == f"{_MODELSCOPE}/files":
            files = [
                {"Path": n, "Type": "blob", "Size": len(d), "Sha256": hashlib.sha256(d).hexdigest()}
                for n, d in self.server.files.items()
            ]
            return self.reply(200, {"Code": 200, "Success": True, "Data": {"Files": files}})
        name = parse_qs(urlsplit(self.path).query)["FilePath"][0]
        if name.endswith(".safetensors") and not self.headers["Host"].startswith("localhost"):
            return self.reply(302, Location=self.large() + self.path)
        return self.content(self.server.files[name])

    def aistudio(self) -> None:
        hub, asked = self.server, urlsplit(self.path)
        query = parse_qs(asked.query)
        what, _, given = asked.path.removeprefix(hub.moved)[len(_AISTUDIO) + 1 :].partition("/")
        if what == "tags":
            found = given == "v1.0"
            return self.reply(200 if found else 404, {"commit": {"sha": COMMIT}} if found else {})
        if what == "git":
            first = (int(query["page"][0]) - 1) * hub.per_page
            tree: list[dict] = [{"path": "sub", "type": "tree", "mode": "040000", "sha": COMMIT}]
            for n, d in hub.files.items():
                kept = _in_git(n, d)
                entry = {"path": n, "type": "blob", "mode": "100644", "sha": _git_hash(kept)}
                tree.append(entry | {"size": len(kept)})
            end = first + hub.per_page
            return self.reply(200, {"tree": tree[first:end], "truncated": end < len(tree)})
        # A path is one component, with its slashes escaped.
        name, data = unquote(given), hub.files[unquote(given)]
        if "/" in given:
            return self.reply(400)
        if what == "contents":
            kept = _in_git(name, data)
            values: dict = {"sha": _git_hash(kept), "size": len(data), "content": None}
            if hub.states_pointers:
                values |= {"size": len(kept), "content": base64.b64encode(kept).decode()}
            return self.reply(200, values)
        large, host = name.endswith(".safetensors"), self.headers["Host"]
        if large and not asked.path.startswith(hub.moved):
            return self.reply(307, Location=hub.moved + self.path)
        if large and not host.startswith("localhost"):
            return self.reply(302, Location=self.large() + self.path)
        return self.content(data)

    def content(self, data: bytes) -> None:
        status, asked = 200, self.headers.get("Range")
        if asked and self.server.has_ranges:
            data, status = data[int(asked.removeprefix("bytes=").rstrip("-")) :], 206
        length = len(data)
        if self.server.damages:
            data = b"~" + data[1:]
        if self.server.breaks:
            self.server.breaks -= 1
            self.close_connection = True
            data = data[: length // 2]
        return self.reply(status, data, length, ETag='"0"')

    def api(self, path: str, body: bytes) -> None:
        hub, answer = self.server, {"sha": COMMIT, "siblings": [], "success": True}
        answer |= {"id": "org/new", "private": hub.is_private, "commitOid": COMMIT}
        answer |= {"url": f"{hub.address}/org/new", "commitUrl": f"{hub.address}/org/new/commit/1"}
        if "/preupload/" in path:
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": each["path"], "shouldIgnore": False} for each in json.loads(body)["files"]
            ]
            answer["files"] = [e | {"uploadMode": modes["tensors" in e["path"]]} for e in files]
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{hub.address}/put/{each['oid']}"}}
            answer = {"transfer": "basic", "objects": objects}
        elif path.startswith("/put/"):
            hub.committed[path[5:]] = body
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.committed[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.committed[value["path"]] = hub.committed.pop(value["oid"])
        self.reply(404 if "agent" in path else 200, answer)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815
