"""The page of a report.

Guarantees: it is one file without external references, with the licence of what it holds; its data
are all numbers of the metrics files at their steps, whichever metrics a run lacks; texts of a run
cannot become markup; the selectable x-axes are those that all runs have; in a browser every curve
is drawn and the controls work.
"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paddle_vl.report.report import write_report
from tests.single_card_tests.report.run_folders import (
    LINES,
    SETTINGS,
    START,
    without,
    write_run,
)
from tests.support.browser import BROWSER, browser

VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Elements in order, their attributes and texts; checks that each is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.id = ""
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.id = dict(attrs).get("id", tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts[self.id] = self.texts.get(self.id, "") + data


def page_of(tmp_path: Path, *folders: Path) -> tuple[str, Page]:
    file, *others = write_report(folders, tmp_path / "report", with_pictures=False)
    assert not others
    text = file.read_text(encoding="utf-8")
    return text, Page(text)


def data_of(tmp_path: Path, *folders: Path) -> dict:
    return json.loads(page_of(tmp_path, *folders)[1].texts["data"])


def two_runs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "a"), write_run(tmp_path / "b", without("tokens_per_second"))]


def test_page_is_whole_and_asks_nobody(tmp_path):
    text, page = page_of(tmp_path, *two_runs(tmp_path))
    assert page.open == []
    references = [
        (tag, value) for tag, name, value in page.attributes if name in ("src", "href", "srcset")
    ]
    assert references == [("link", "data:,")]
    assert "Copyright (c) 2022 Leon Sorokin" in text
    # uPlot names its home in a comment.
    text = text.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")
    assert not re.search(r"https?:|url\((?!#)|@import|\bimport\b|fetch\(|XMLHttpRequest", text)
    policy = next(value for tag, name, value in page.attributes if value.startswith("default-src"))
    assert policy.startswith("default-src 'none'")


def test_data_are_the_numbers_of_the_metrics_files(tmp_path):
    folders = two_runs(tmp_path)
    with (folders[0] / "metrics.jsonl").open("a") as stream:
        stream.write('{"st')
    starts = {"starts": [START, START | {"first_step": 3}]}
    (folders[1] / "run.json").write_text(json.dumps(starts))
    text, page = page_of(tmp_path, *folders)
    assert "cut short and left out: a." in text
    data = json.loads(page.texts["data"])
    assert [run["resumed"] for run in data["runs"]] == [[], [3]]
    for place, lines in enumerate((LINES, without("tokens_per_second"))):
        found = {
            curve["key"]: dict(zip(data["steps"][curve["steps"]], curve["values"], strict=True))
            for panel in data["panels"]
            for curve in panel["curves"]
            if curve["run"] == place
        }
        nested = found.pop("quite_new/a_min"), found.pop("quite_new/a_max")
        assert nested == ({30: 1}, {30: 3})
        keys = {key for line in lines for key in line} - {"step", "loader", "quite_new"}
        assert found == {
            key: {line["step"]: line[key] for line in lines if key in line} for key in keys
        }
    assert [run["skipped"] for run in data["runs"]] == [[[10, 20, 10]]] * 2


def test_texts_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script><b>"
    settings = {"train": SETTINGS["train"] | {"note": evil}}
    lines = [line | {f"x/{evil}": 1} for line in LINES]
    text, page = page_of(tmp_path, write_run(tmp_path / "<b>", lines, settings))
    data = json.loads(page.texts["data"])
    assert page.open == []
    assert [tag for tag, _, _ in page.attributes].count("b") == 0
    assert "<script>alert" not in text
    assert any(curve["key"] == f"x/{evil}" for one in data["panels"] for curve in one["curves"])


def test_axes_are_what_rises_in_all_runs(tmp_path):
    one = write_run(tmp_path / "a")
    assert data_of(tmp_path, one)["axes"] == ["epoch", "target_tokens"]
    other = write_run(
        tmp_path / "b", [{"step": 0, "epoch": 0.0}, {"step": 1, "epoch": 3.0}, *LINES]
    )
    assert data_of(tmp_path, one, other)["axes"] == ["target_tokens"]
    other = write_run(tmp_path / "c", without("target_tokens"))
    assert data_of(tmp_path, one, other)["axes"] == ["epoch"]


ACTIONS = Path(__file__).with_name("page_actions.js")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: chromium-headless-shell)")
def test_browser_draws_every_curve_and_the_controls_work(tmp_path):
    lines = [line | {"skipped_samples": 0} for line in LINES]
    page_of(tmp_path, write_run(tmp_path / "z", lines), *two_runs(tmp_path)[1:])
    with browser(tmp_path / "profile") as tab:
        tab.open((tmp_path / "report" / "report.html").as_uri(), 1400, 900)
        assert tab.run(ACTIONS.read_text()) == []
        assert tab.problems == []
