"""The counts on the page about PaddleFleet are those of the stand-ins today."""

from pathlib import Path

from tests.support import forked

TOOL = Path(__file__).parents[3] / "tools" / "count_paddlefleet.py"


def test_the_page_has_the_counts_of_today():
    done = forked.run([str(TOOL), "--check"])
    assert done.returncode == 0, done.stderr
