"""Write the import graph of the package and the path of one batch into docs/architecture.md.

    python tools/draw_architecture.py            write both into the page
    python tools/draw_architecture.py --check    exit with 1 where the page is not up to date

The graph is a Mermaid graph made from the import statements: an arrow from
A to B means that A imports B; arrows that follow from others are left out. The path comes from
`tools/trace_batch.py`.
"""

import argparse
import ast
import logging
import re
import sys
from pathlib import Path

from trace_batch import passed_files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "paddle_vl"
PAGE = ROOT / "docs" / "architecture.md"
# Nodes of the graph: folders of the package, and each folder of families/.
_SPLIT = "families"


def part_of(module: str) -> str | None:
    """Node of a module, given by its dotted name below the package; None for none."""
    names = module.split(".")
    if names[0] == _SPLIT and len(names) > 1 and (PACKAGE / _SPLIT / names[1]).is_dir():
        return f"{_SPLIT}/{names[1]}"
    return names[0] if (PACKAGE / names[0]).is_dir() else None


def imports() -> dict[str, set[str]]:
    """The nodes that each node imports."""
    found: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        own = part_of(".".join(file.relative_to(PACKAGE).with_suffix("").parts))
        if own is None:
            continue
        targets = found.setdefault(own, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.startswith("paddle_vl."):
                    other = part_of(name.removeprefix("paddle_vl."))
                    if other is not None and other != own:
                        targets.add(other)
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without arrows that a longer path implies."""

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for target in graph[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        return seen

    behind = {part: reached(part) for part in graph}
    return {
        part: {t for t in targets if not any(t in behind[o] for o in targets - {t})}
        for part, targets in graph.items()
    }


def first_sentence(part: str) -> str:
    """First sentence of a node's docstring."""
    text = ast.get_docstring(
        ast.parse((PACKAGE / part / "__init__.py").read_text(encoding="utf-8"))
    )
    return re.split(r"\n\n|(?<=\.)\s", text or "", maxsplit=1)[0].replace("\n", " ").rstrip(".")


def picture() -> str:
    """The Mermaid graph and a table of its nodes."""
    graph = imports()
    lines = ["```mermaid", "graph TD"]
    names = {part: part.replace("/", "_") for part in graph}
    lines += [f'    {names[part]}["{part}"]' for part in sorted(graph)]
    for part, targets in sorted(reduced(graph).items()):
        lines += [f"    {names[part]} --> {names[target]}" for target in sorted(targets)]
    lines += ["```", "", "| part | what it is | files |", "| --- | --- | --- |"]
    for part in sorted(graph):
        files = [f for f in (PACKAGE / part).rglob("*.py") if f.name != "__init__.py"]
        if part == _SPLIT:
            files = [f for f in files if f.parent == PACKAGE / part]
        lines.append(f"| `{part}` | {first_sentence(part)} | {len(files)} |")
    return "\n".join(lines)


def path() -> str:
    """Table of the files that a batch passes."""
    lines = ["| | file | where the batch enters it |", "| --- | --- | --- |"]
    for number, (name, function) in enumerate(passed_files().first.items(), 1):
        function = function.replace(".<locals>", "").replace("<listcomp>", "[...]")
        lines.append(f"| {number} | `{name}` | `{function}` |")
    return "\n".join(lines)


def written(page: str, name: str, text: str) -> str:
    """The page with the text between two markers replaced.

    Raises:
        ValueError: the page does not have the markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found, rest = page.partition(begin)
    _, also_found, tail = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{PAGE} has no {begin} ... {end}: put both on lines of their own")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare only")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    page = PAGE.read_text(encoding="utf-8")
    made = written(written(page, "picture", picture()), "path", path())
    if options.check:
        if made != page:
            sys.exit(f"{PAGE.name} is out of date: run python tools/draw_architecture.py")
    else:
        PAGE.write_text(made, encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
