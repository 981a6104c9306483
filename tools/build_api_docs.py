"""Builds the API reference from the docstrings, with pdoc, as static HTML.

    python tools/build_api_docs.py --output site/api

A module that cannot be imported, or a public name that is not found, fails the build.
"""

import argparse
import pkgutil
import sys
import warnings
from importlib import import_module
from pathlib import Path

import paddle
import pdoc
import pdoc.render

import paddle_vl


def build(output: Path, *, with_source: bool = True) -> int:
    """Write the pages into a folder.

    Args:
        with_source: with the source code of everything, and an index for searching.

    Returns:
        The number of pages.

    Raises:
        RuntimeError: pdoc warned; the message has all warnings.
    """
    # pdoc reads a module's dictionary; the public names are imported on first use.
    for name in paddle_vl.__all__:
        setattr(paddle_vl, name, getattr(paddle_vl, name))
    # Paddle's compiled base class has no module name, which pdoc needs of every class.
    paddle.autograd.PyLayer.__base__.__module__ = "paddle.autograd"
    pdoc.render.configure(docformat="google", show_source=with_source, search=with_source)
    # pdoc shows only the names in `__all__` of a package, so its modules are listed here.
    names = ["paddle_vl"]
    for item in pkgutil.walk_packages(paddle_vl.__path__, "paddle_vl."):
        parent = import_module(item.name.rpartition(".")[0])
        if hasattr(parent, "__all__") and item.name != "paddle_vl.__main__":
            names.append(item.name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        pdoc.pdoc(*names, output_directory=output)
    # pdoc does not show the fields that a TypedDict inherits.
    problems = [
        str(item.message)
        for item in caught
        if "pdoc" in item.filename and "Cannot determine where" not in str(item.message)
    ]
    if problems:
        raise RuntimeError("the API reference has problems:\n" + "\n".join(problems))
    return len(list(output.rglob("*.html")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("site/api"), help="folder of the pages")
    parser.add_argument(
        "--text-only", action="store_true", help="no source code and no search; takes less time"
    )
    options = parser.parse_args()
    try:
        count = build(options.output, with_source=not options.text_only)
    except RuntimeError as error:
        sys.exit(str(error))
    print(f"{count} pages: {options.output}/index.html")


if __name__ == "__main__":
    main()
