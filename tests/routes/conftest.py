"""The folder of the routes, and their table in the docs."""


import pytest

from tests.routes.runs import Routes


@pytest.fixture(scope="session")
def shared_routes(tmp_path_factory) -> Routes:
    """The folder that all workers of the tests share, with its data."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "routes"
    folder.mkdir(exist_ok=True)
    routes = Routes(folder)
    routes.once("data", routes.make_data)
    return routes


@pytest.fixture
def routes(shared_routes, record_property) -> Routes:
    before = shared_routes.seconds
    yield shared_routes
    record_property("seconds", shared_routes.seconds - before)
