"""The folder of the routes, which all workers of the tests share."""

from collections.abc import Iterator

import pytest

from tests.routes.runs import Routes


@pytest.fixture(scope="session")
def shared_routes(tmp_path_factory) -> Routes:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "routes"
    folder.mkdir(exist_ok=True)
    return Routes(folder)


@pytest.fixture
def routes(shared_routes, record_property) -> Iterator[Routes]:
    before = shared_routes.seconds
    yield shared_routes
    record_property("seconds", shared_routes.seconds - before)
