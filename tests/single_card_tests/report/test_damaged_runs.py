"""Reports of runs with damaged files, or with strange metric names and values.

Guarantees: a damaged run.json is refused with file, entry, key and value, and optional values may
be null; no name or value of a metric stops a report; invalid lines are named; on a full disk the
error names the file.
"""

import json
import resource

import pytest

from paddle_vl.cli.main import main
from paddle_vl.train.reporting.run_files import read_starts
from tests.single_card_tests.report.run_folders import LINES, START, write_run


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (3, "start 2 is 3, not an object"),
        (None, "start 2 is None"),
        ([], r"start 2 is \[\]"),
        ({"started": 5}, "start 2 has started 5; a time"),
        ({"started": "yesterday"}, "start 2 has started 'yesterday'; a time"),
        ({"ended": ["x"]}, r"start 2 has ended \['x'\]"),
        ({"ended": "2026-11-21T10:00:00"}, ".*of which one has no time zone"),
        ({"started": None}, "start 2 has ended, but no 'started'"),
        ({"first_step": "3"}, "start 2 has first_step '3'; a number from 0"),
        ({"first_step": -1}, "start 2 has first_step -1"),
        ({"last_step": True}, "start 2 has last_step True"),
        ({"command": "train"}, "start 2 has command 'train'; a list of texts"),
        ({"command": [1]}, r"start 2 has command \[1\]"),
        ({"versions": ["numpy"]}, "start 2 has versions"),
        ({"versions": {"numpy": 2}}, "start 2 has versions"),
        ({"git": {}}, r"start 2 has git \{\}; an object with a revision"),
        ({"git": "abc"}, "start 2 has git 'abc'"),
        ({"parallel": {"dp_degree": "2"}}, "start 2 has parallel"),
        ({"parallel": 4}, "start 2 has parallel 4"),
        ({"device": 3}, "start 2 has device 3"),
        ({"num_processes": 1.5}, "start 2 has num_processes 1.5"),
    ],
)
def test_damaged_starts_are_refused_by_entry_and_key(tmp_path, change, named, capsys):
    run = write_run(tmp_path / "a")
    entry = START | change if isinstance(change, dict) else change
    (run / "run.json").write_text(json.dumps({"starts": [START, entry]}))
    with pytest.raises(RuntimeError, match=rf"run\.json: {named}.*mend it, or move it away"):
        read_starts(run)
    assert main(["report", str(run), "--no-png"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {run}/run.json: start 2")


@pytest.mark.parametrize("name", list(START))
def test_entries_may_lack_what_a_run_could_not_tell(tmp_path, name):
    for number, entry in enumerate((START | {name: None, "ended": None}, {}, {name: START[name]})):
        if name == "ended" and number == 2:
            continue
        run = write_run(tmp_path / str(number), starts=[entry])
        assert main(["report", str(run), "--no-png"]) == 0


NAMES = ("$\\frac{", "$", "$$$", "\0", "\ud800", "_hidden", "a" * 3000, "a\nb", "<b>", "%s", "\\",
         "../x", "/", "eval_", " ")  # fmt: skip


def test_no_name_and_no_value_of_a_metric_keeps_a_report_from_being_drawn(tmp_path):
    values = (None, True, "x", [1], {}, 10**400, 1e308, -1e308, 5e-324, 0, -1, float("nan"), 2.0)
    lines = [
        {"step": step, "loss": values[step], "epoch": values[step]}
        | {name: 1.0 + step for name in NAMES}
        | {f"{name}/part": 2.0 for name in NAMES[:6]}
        for step in range(len(values))
    ]
    run = write_run(tmp_path / "a", lines)
    assert main(["report", str(run)]) == 0
    pictures = {path.name for path in (run / "report").glob("*.png")}
    assert len(pictures) == len(NAMES) + 2
    assert all(path.parent == run / "report" for path in (run / "report").rglob("*"))


@pytest.mark.parametrize(
    "line",
    [b"{", b"\xff\xfe", b"\0", b"[" * 100_000, b"42", b"[]", b'{"loss": 1}', b'{"step": "1"}',
     b'{"step": true}', b'{"step": -1}', b'{"step": 1e3}', b'{"step": ' + b"1" * 30 + b"}",
     b'{"step": ' + b"1" * 5000 + b"}"],
)  # fmt: skip
def test_lines_that_are_none_are_named(tmp_path, line, capsys):
    run = write_run(tmp_path / "a")
    file = run / "metrics.jsonl"
    file.write_bytes(json.dumps(LINES[0]).encode() + b"\n" + line + b"\n" + file.read_bytes())
    assert main(["report", str(run), "--no-png"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {file}:2 is not a metrics line")


def test_full_disk_is_said_by_the_report(tmp_path, capsys):
    """A limit on the size of files fails a write as a full disk does."""
    run = write_run(tmp_path / "a")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        assert main(["report", str(run), "--no-png"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = capsys.readouterr().err
    assert message.startswith("error: [Errno 27] File too large")
    assert "report.html" in message
    assert list((run / "report").iterdir()) == []
