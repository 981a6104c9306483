"""Images and videos at http(s) addresses, and data URIs.

Guarantees: no address and no redirect reaches a host that
is not public; sizes and times are bounded; a file is fetched once and appears complete or not at
all; data URIs are base64 of a bounded size.
"""

import base64
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paddle_vl.data import remote
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.remote import RemoteSettings, data_uri_bytes, fetch

CONTENT = bytes(range(256)) * 64


class Handler(BaseHTTPRequestHandler):
    asked: list[str]

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.asked.append(self.path)
        path, _, target = self.path.partition("?")
        if path == "/redirect":
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(500 if path == "/fault" else 200)
        if path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        if path not in ("/endless", "/slow"):
            length = len(CONTENT) * (2 if path == "/broken" else 1)
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if path == "/slow":
            for _ in range(50):
                self.wfile.write(b"x")
                time.sleep(0.1)
        with suppress(OSError):
            for number in range(60 if path == "/endless" else 1):
                time.sleep(0.05 * (number > 9))
                self.wfile.write(CONTENT)


@pytest.fixture
def server():
    handler = type("Own", (Handler,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        made.daemon_threads = True
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def at(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def settings(tmp_path):
    return RemoteSettings(1 << 16, 5.0, tmp_path / "cache", ("127.0.0.1",))


def refused(address, settings, told):
    with pytest.raises(BadSampleError, match=told) as caught:
        fetch(address, settings)
    assert caught.value.kind == "remote"
    assert not [
        file for file in settings.cache.rglob("*") if file.suffix != ".lock" and file.is_file()
    ]


def test_nothing_is_fetched_from_hosts_that_are_not_public(at, server, settings):
    other = replace(settings, allowed_hosts=("localhost",))
    refused(f"{at}/a", other, "127.0.0.1, which is not public")
    assert server.RequestHandlerClass.asked == []


def test_a_file_is_fetched_once_by_all_that_ask(at, server, settings):
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(fetch, [f"{at}/a?x=\u00e4 b"] * 4, [settings] * 4))
    (file,) = files
    assert file.read_bytes() == CONTENT
    assert server.RequestHandlerClass.asked == ["/a?x=%C3%A4%20b"]
    assert fetch(f"{at}/b", settings) != file
    with pytest.raises(BadSampleError, match="it has 16384 bytes, and the limit is 100"):
        fetch(f"{at}/b", replace(settings, max_bytes=100))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/fault", "the server says 500"),
        ("/packed", "the server says 200 OK gzip"),
        ("/broken", "IncompleteRead"),
        ("/endless", "more than 65536 bytes, the limit"),
        ("/redirect?file:///etc/passwd", "'file:///etc/passwd' is not http"),
        ("/redirect?http://169.254.169.254/", "169.254.169.254, which is not public"),
        ("/redirect?http://[::ffff:10.0.0.1]/", "which is not public"),
        ("/redirect?//localhost/a", "localhost has the address .*, which is not public"),
        ("/redirect?/redirect", "more than 5 redirects"),
    ],
)  # fmt: skip
def test_what_a_server_may_not_do_is_refused_at_once(at, settings, path, told):
    began = time.monotonic()
    refused(at + path, settings, told)
    assert time.monotonic() - began < 2


def test_a_redirect_is_followed_and_an_endless_one_ends(at, settings):
    assert fetch(f"{at}/redirect?/a", settings).read_bytes() == CONTENT
    address = f"{at}/redirect?" * 7 + "/a"
    refused(address, replace(settings, cache=settings.cache / "other"), "more than 5 redirects")


@pytest.mark.parametrize(
    ("address", "is_public"),
    [("8.8.8.8", True), ("2001:4860:4860::8888", True), ("64:ff9b::808:808", True),
     *((each, False) for each in (
         "10.1.2.3", "127.0.0.1", "169.254.169.254", "192.168.0.1", "172.16.0.1", "100.64.0.1",
         "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%1", "fc00::1",
         "ff02::1", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1"))],
)  # fmt: skip
def test_public_addresses_are_told_from_others(address, is_public):
    assert remote._is_public(address) == is_public


@pytest.mark.parametrize(
    ("addresses", "told", "connected"),
    [
        (["8.8.8.8", "127.0.0.1"], "mixed.example has the address 127.0.0.1, which is not", []),
        (["8.8.8.8", "8.8.4.4"], "ConnectionRefusedError", [("8.8.8.8", 80), ("8.8.4.4", 80)]),
    ],
)
def test_the_addresses_that_were_checked_are_those_connected_to(
    addresses, told, connected, settings, monkeypatch
):
    resolved, tried = [], []

    def getaddrinfo(host, port, **options):
        resolved.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    def create_connection(address, timeout):
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    refused("http://mixed.example/a", settings, told)
    assert (resolved, tried) == (["mixed.example"], connected)


def test_a_slow_body_ends_at_the_time_limit(at, settings):
    began = time.monotonic()
    refused(f"{at}/slow", replace(settings, timeout_s=0.4), "it took more than 0.4 s")
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "address",
    ["ftp://a/b", "file:///etc/passwd", "http://", "http://u:p@a/", "http://a:99999/", "http://[x"],
)
def test_what_is_no_http_address_is_refused(address, settings):
    refused(address, settings, r"is not http\(s\)://host/path; save it as a file")


def test_https_checks_the_certificate(server, settings, tmp_path, monkeypatch):
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -addext"
    names = ["subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    address = f"https://127.0.0.1:{server.server_address[1]}"
    refused(f"{address}/a", settings, "CERTIFICATE_VERIFY_FAILED")
    trusting = ssl.create_default_context(cafile=tmp_path / "cert")
    monkeypatch.setattr(ssl, "create_default_context", lambda: trusting)
    assert fetch(f"{address}/a", settings).read_bytes() == CONTENT
    plain = address.replace("https", "http")
    told = f"it leads from https to '{plain}/a'"
    with pytest.raises(BadSampleError, match=told):
        fetch(f"{address}/redirect?{plain}/a", settings)


def test_a_data_uri_is_its_bytes_whatever_its_type():
    text = base64.b64encode(CONTENT).decode()
    assert data_uri_bytes(f"data:image/png;base64,{text}", len(CONTENT)) == CONTENT
    assert data_uri_bytes("data:text/html;charset=x;base64,YQ==", 1) == b"a"
    form, limit = "data:TYPE;base64,CONTENT is needed", "has 2 bytes, and the limit is 1"
    others = {"data:image/png,a": form, "data:;base64": form, "data:;base64,YWI=": limit}
    others |= {"data:;base64,Y": "Invalid base64", "data:;base64,Y!==": "Only base64"}
    for bad, told in others.items():
        with pytest.raises(BadSampleError, match=told) as caught:
            data_uri_bytes(bad, 1)
        assert caught.value.kind == "remote"
