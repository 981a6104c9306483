"""Training of conversations, documents, preferences, captions and given answers on several ranks.

Guarantees: each row of `one_device` is what one device does.
"""

import pytest

from tests.multi_card_tests.one_device import CONVERSATIONS, ROLLOUTS, rows, taking


@pytest.fixture(scope="module")
def take(tmp_path_factory):
    return taking(tmp_path_factory)


@rows([*CONVERSATIONS, *ROLLOUTS])
def test_a_run_equals_one_device(take, row):
    take(row)
