"""The documentation.

Guarantees: the README is short; the index has every page; every test, file, page and heading that a
page or the code names exists; every `paddle-vl` command that a page shows is understood, and every
setting in commands and run files is one of a family's.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from paddle_vl.cli.main import _parse, build_parser
from paddle_vl.config.family_settings import settings_help

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
# Files of a user, in examples of commands.
USERS = {"my_metrics.py", "serve.py"}


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 2000


def test_the_index_has_every_page_once():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+\.md)\]\(\1\)", index, re.MULTILINE)
    assert sorted(listed) == [page.name for page in DOCS if page.name != "README.md"]


def test_tests_that_the_docs_name_exist():
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for page in DOCS:
        named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
        assert named <= tests, page.name


def anchors(page: Path) -> set[str]:
    """The headings of a page as ends of links, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_paths_that_the_pages_name_exist():
    assert len(PAGES) > 20
    tracked = [
        path.relative_to(ROOT)
        for top in ("paddle_vl", "tools", "configs", "tests", "docs", "examples")
        for path in (ROOT / top).rglob("*")
        if path.suffix != ".pyc"
    ]
    # Every end of a path: a page may leave its beginning out.
    ends = {"/".join(path.parts[i:]) for path in tracked for i in range(len(path.parts))}
    ends |= {path.name for path in ROOT.iterdir()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files = re.findall(r"(?<![\w/.*{-])((?:[\w.-]+/)*[\w-]+\.(?:py|c|sh|slurm))\b", text)
        folders = re.findall(
            r"(?<![\w/.*-])((?:paddle_vl|tools|configs|tests|docs|examples)/[\w./-]+)", text
        )
        for name in {*files, *folders} - USERS:
            # `NAME` is a placeholder, and a pattern names several.
            if not re.search("NAME|test_$", name):
                assert name.rstrip("./") in ends, f"{page.name} names {name}"


def test_links_lead_to_pages_and_headings():
    for page in PAGES:
        for link in re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8")):
            name, _, heading = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not heading or heading in anchors(target), f"{page.name} links to {link}"


def test_pages_that_the_code_names_exist():
    names = {page.name for page in DOCS}
    for top in ("paddle_vl", "tools", "configs", "examples"):
        for file in (ROOT / top).rglob("*"):
            if file.suffix in (".py", ".yaml", ".slurm", ".sh"):
                named = re.findall(r"\bdocs/(\w+\.md)", file.read_text(encoding="utf-8"))
                assert {*named} <= names, file


def commands() -> list[tuple[str, list[str]]]:
    """The `paddle-vl` commands of all pages: page, and arguments."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                names = [i for i, word in enumerate(words) if word.endswith("paddle-vl")]
                if names and "pip" not in words:
                    found.append((page.name, words[names[0] + 1 :]))
    return found


def test_commands_are_understood():
    found = commands()
    assert {"train", "evaluate", "generate", "merge", "export", "report", "profile", "doctor"} <= {
        arguments[0] for _, arguments in found
    }
    for page, arguments in found:
        try:
            _parse(build_parser(), arguments)
        except SystemExit:
            pytest.fail(f"{page} shows a command that is not understood: {arguments}")


def is_setting(name: str) -> bool:
    """Whether a dotted name is a setting of a family, a section of settings, or an entry of one."""
    return any(
        f"{known}.".startswith(f"{name}.") or name.startswith(f"{known}.")
        for _, _, descriptions in settings_help()
        for known in descriptions
    )


def test_settings_in_commands_and_run_files_exist():
    names = []
    for page, arguments in commands():
        names += [
            (page, word.split("=")[0]) for word in arguments if re.match(r"\w+\.\w+.*=", word)
        ]
    for page in PAGES:
        for block in blocks(page, "yaml"):
            for section, keys in yaml.safe_load(block).items():
                names += [(page.name, f"{section}.{key}") for key in keys]
    assert len(names) > 40
    assert not is_setting("train.lr")
    assert [(page, name) for page, name in names if not is_setting(name)] == []
