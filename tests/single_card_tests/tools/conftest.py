"""The digits and the corpus around them, for all files of tests."""

from pathlib import Path

import pytest

from make_digits_corpus import make_digits_corpus
from tests.support.made_once import made_once


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    pytest.importorskip("sklearn.datasets")
    return made_once(tmp_path_factory, "digits_corpus", make_digits_corpus)


@pytest.fixture(scope="session")
def digits(corpus) -> Path:
    return corpus / "digits"
