"""`paddle-vl report`.

Guarantees: it writes a page and, on request, a PNG per panel, by default in the run's folder; it
loads neither Paddle nor, for the page alone, matplotlib; an error in a run is one line and leaves
no report.
"""

import subprocess
import sys

import pytest
from PIL import Image

from paddle_vl.cli.main import main
from tests.single_card_tests.report.run_folders import write_run


def test_page_and_a_picture_for_every_panel(tmp_path, capsys):
    run = write_run(tmp_path / "a", [{"step": 1, "loss": 2.0, "eval_loss": 2.0, "epoch": 1}])
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == (
        f"report written to {run}/report/report.html, 2 pictures beside it\n"
    )
    names = sorted(path.name for path in (run / "report").iterdir())
    assert names == ["epoch.png", "loss.png", "report.html"]
    with Image.open(run / "report" / "loss.png") as image:
        assert image.size == (1280, 800)


def test_several_runs_lie_where_asked(tmp_path, monkeypatch):
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "eval_loss": 2.0}]
    runs = [
        str(write_run(tmp_path / name, lines[:number])) for number, name in ((1, "a"), (2, "b"))
    ]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *runs, "--no-png"]) == 0
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.html"]
    assert main(["report", *runs, "--output", "x/y"]) == 0
    assert (tmp_path / "x" / "y" / "loss.png").is_file()


def test_page_alone_loads_neither_paddle_nor_matplotlib(tmp_path):
    run = write_run(tmp_path / "a")
    program = (
        "import sys\nfrom paddle_vl.cli.main import main\n"
        f"assert main(['report', {str(run)!r}, '--no-png']) == 0\n"
        "assert not {'paddle', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("runs", [["absent"], ["a", "a"]])
def test_errors_are_one_line_and_leave_no_report(tmp_path, monkeypatch, capsys, runs):
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *runs]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "report").exists()
