"""Serves the report of running runs on this machine, and refreshes it.

One address is answered, `/`, and it names no file. Requests of another site's page, whose name was
made to lead here, have its name as their host and are refused.
"""

import hashlib
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from paddle_vl.report.panels import panels_of
from paddle_vl.report.report import page
from paddle_vl.report.runs import CONFIG_FILE, read_runs
from paddle_vl.report.seeds import by_seed
from paddle_vl.train.reporting.run_files import (
    ACTIONS_FILE,
    METRICS_FILE,
    PREDICTIONS_FILE,
    ROLLOUTS_FILE,
    RUN_FILE,
)

HOST = "127.0.0.1"
_FILES = (METRICS_FILE, RUN_FILE, CONFIG_FILE, PREDICTIONS_FILE, ROLLOUTS_FILE, ACTIONS_FILE)


class _Handler(BaseHTTPRequestHandler):
    server: "ReportServer"

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "").rpartition(":")[0] not in (HOST, "localhost"):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "open http://127.0.0.1 instead")
            return
        address = urlsplit(self.path)
        if address.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "the report is at /")
            return
        try:
            version, text = self.server.read()
        except (OSError, ValueError, RuntimeError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))
            return
        # A page that is open tells what it has.
        if parse_qs(address.query).get("since") == [version]:
            self._answer(HTTPStatus.NO_CONTENT, "text/html", "")
        else:
            self._answer(HTTPStatus.OK, "text/html", text)

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            # A run that has no metrics yet.
            self.send_header("Refresh", "2")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a page asks every second."""


class ReportServer(ThreadingHTTPServer):
    """Serves the report of runs to browsers of this machine.

    Args:
        port: 0 for any.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[str | Path], port: int, joins_seeds: bool = False):
        self._folders, self._joins_seeds = [Path(folder) for folder in folders], joins_seeds
        self._lock, self._seen, self._page = Lock(), "", ""
        super().__init__((HOST, port), _Handler)

    def read(self) -> tuple[str, str]:
        """The page as it is now, which is read again when a file of a run has changed, and its
        version, which changes with it.

        Raises:
            ValueError, RuntimeError: see `paddle_vl.report.runs.read_runs`.
        """
        with self._lock:
            # Before the files are read: what changes meanwhile is read at the next request.
            files = (folder / name for folder in self._folders for name in _FILES)
            states = [(file, file.stat()) for file in files if file.is_file()]
            told = [(str(file), stat.st_mtime_ns, stat.st_size) for file, stat in states]
            version = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
            if version != self._seen:
                runs = read_runs(self._folders)
                runs = by_seed(runs) if self._joins_seeds else runs
                self._page = page(runs, panels_of(runs), version)
                self._seen = version
            return self._seen, self._page

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"
