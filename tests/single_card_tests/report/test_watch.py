"""`paddle-vl report --watch`.

Guarantees: it listens on loopback, answers two addresses and reads no other file; hosts of other
names and other methods are refused; a run without metrics is waited for; a page that is open gets
new metrics without being loaded again, in a browser too, where folds stay; predictions are shown
with their pictures.
"""

import http.client
import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from paddle_vl.cli.main import main
from paddle_vl.report import watch
from paddle_vl.report.report import write_report
from tests.single_card_tests.report.run_folders import LINES, write_run
from tests.support.browser import BROWSER, browser

MORE = {"step": 40, "loss": 1.5}
CHUNK = {"dataset": "arm", "predicted": [[0.0]], "true": [[1.0]]}


@contextmanager
def serving(*folders: Path):
    with watch.ReportServer(folders, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answer(server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    got = connection.getresponse()
    return got.status, got.read().decode()


def append(folder: Path, line: dict) -> None:
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def test_page_and_its_data_follow_the_run(tmp_path):
    run = tmp_path / "a"
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, text = answer(server, "/")
        assert (status, "is not the folder of a run" in text) == (503, True)
        write_run(run)
        status, text = answer(server, "/")
        assert status == 200
        version = re.search('data-version="(.*?)"', text)[1]
        assert "connect-src 'self'" in text
        assert answer(server, f"/?since={version}") == (204, "")
        append(run, MORE)
        status, text = answer(server, f"/?since={version}")
        fresh = re.search('data-version="(.*?)"', text)[1]
        assert fresh != version
        data = re.search("id='data'>(.*?)</script>", text)[1]
        assert json.loads(data)["steps"][0] == [10, 20, 30, 40]
        assert "40 of 30" in text
        (run / "actions.json").write_text(json.dumps({"step": 40, "chunks": [CHUNK]}))
        status, text = answer(server, f"/?since={fresh}")
        assert (status, "Actions at step 40" in text) == (200, True)


@pytest.mark.parametrize(
    ("path", "method", "host", "status"),
    [
        ("/metrics.jsonl", "GET", None, 404),
        ("/../../../etc/passwd", "GET", None, 404),
        ("/%2e%2e/%2e%2e/etc/passwd", "GET", None, 404),
        ("/data/../a/run.json", "GET", None, 404),
        ("/", "GET", "evil.example:8321", 403),
        ("/", "POST", None, 501),
        ("/", "PUT", None, 501),
    ],
)
def test_nothing_else_is_answered(tmp_path, path, method, host, status):
    with serving(write_run(tmp_path / "a")) as server:
        found, text = answer(server, path, method, host)
    assert found == status
    assert "root:" not in text
    assert "loss" not in text


def test_options_that_do_not_fit_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["report", "a", "--watch", "70000"])
    assert "70000 is no port from 0 to 65535" in capsys.readouterr().err
    assert main(["report", "a", "--no-png", "--watch", "0"]) == 1
    assert "--watch writes nothing: leave --output and --no-png out" in capsys.readouterr().err


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: chromium-headless-shell)")
def test_browser_draws_what_is_new_without_loading_again(tmp_path):
    run = write_run(tmp_path / "a")
    (run / "actions.json").write_text(json.dumps({"step": 10, "chunks": [CHUNK]}))
    folds = "[...document.querySelectorAll('#tables details')]"
    with serving(run) as server, browser(tmp_path / "profile") as tab:
        tab.open(server.address, 1400, 900)
        tab.run(f"{folds}.forEach((one, i) => (one.open = i % 2 === 1))")
        before = tab.run(f"window.stays = true; look([5, 45]); {folds}.map((one) => one.open)")
        append(run, MORE)
        tab.wait("document.getElementById('tables').textContent.includes('40 of 30')")
        tab.wait("plots.get('loss').data[0].at(-1) === 40")
        assert tab.run("plots.get('loss').data[1]") == [4, None, None, 2, 1.5]
        assert tab.run("[plots.get('loss').scales.x.min, window.stays]") == [5, True]
        assert tab.run(f"{folds}.map((one) => one.open)") == before
        assert {*before} == {False, True}
        assert tab.problems == []


def test_predictions_are_shown_with_their_pictures(tmp_path):
    run = write_run(tmp_path / "a", LINES)
    Image.new("RGB", (600, 300), "red").save(tmp_path / "red.png")
    common = {"task": "colour", "prompt": "<b>Which?", "expected": "red"}
    lines = [
        common | {"sample": "t.jsonl:1", "answer": "red", "is_exact": True},
        common | {"sample": "t.jsonl:2", "answer": "blue", "is_exact": False},
    ]
    lines[0]["images"] = [str(tmp_path / "red.png")]
    lines[1]["images"] = [str(tmp_path / "gone.png")]
    file = run / "predictions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (page,) = write_report([run], tmp_path / "report", with_pictures=False)
    text = page.read_text()
    assert "Predictions of a: 1 of 2 exact, 2 shown" in text
    assert text.count("data:image/jpeg;base64,") == 1
    assert re.search("<p class=.note.>[^<]*gone.png", text)
    assert "&lt;b&gt;Which?" in text
    file.write_text('{"sample": 1}\n')
    with pytest.raises(RuntimeError, match=r"predictions.jsonl:1 is not a prediction"):
        write_report([run], tmp_path / "report", with_pictures=False)
