"""The folder of the routes, which all workers of the tests share, and their table in the docs:

python -m pytest -n 2 --dist loadfile tests/routes --write-routes docs/testing.md

With `-m heavy` it writes the other table.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.routes.page import write_routes
from tests.routes.runs import Routes

# Of the rows that passed: row and processor seconds. Workers send them to this process.
_found: list[tuple[list, float]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-routes", type=Path, metavar="FILE", help="write the table of routes")


@pytest.fixture(scope="session")
def shared_routes(tmp_path_factory) -> Routes:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "routes"
    folder.mkdir(exist_ok=True)
    return Routes(folder)


@pytest.fixture
def routes(shared_routes, request, record_property) -> Iterator[Routes]:
    """Runs command lines, and tells how long those of a row take."""
    before, failed = shared_routes.seconds, request.session.testsfailed
    yield shared_routes
    if request.session.testsfailed == failed:
        shared_routes.forget()
    row = request.node.callspec.params["row"]
    record_property("route", [*row.promised, row.way])
    record_property("seconds", shared_routes.seconds - before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    told: dict[str, Any] = dict(report.user_properties)
    if report.when == "teardown" and "route" in told:
        _found.append((told["route"], told["seconds"]))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    page = session.config.getoption("--write-routes", None)
    if page is not None and exitstatus == 0 and not hasattr(session.config, "workerinput"):
        write_routes(page, _found, bool(session.config.getoption("markexpr") == "heavy"))
