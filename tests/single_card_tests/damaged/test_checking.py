"""`check` finds each kind of fault that a parser may have."""

import json
import socket
import time

import numpy as np
import pytest
from hypothesis import strategies as st

from paddle_vl.families.qwen3_vl.sizes import size_values
from tests.single_card_tests.damaged import checking
from tests.single_card_tests.damaged.checking import SlowError, check
from tests.single_card_tests.damaged.damage import in_file


def missing() -> None:
    raise KeyError("number")


def hanging() -> None:
    while True:
        time.process_time()


FAULTS = {
    "another exception": (missing, KeyError, "number"),
    "another library's": (lambda: np.zeros(2).reshape(3), ValueError, "reshape"),
    "without a name": (lambda: size_values("another"), AssertionError, "does not name its file"),
    "slow": (hanging, SlowError, "0.2 s"),
    # Far above the limit, as Linux counts pages in batches.
    "large": (lambda: np.ones(20_000_000), AssertionError, "took 1.. MiB"),
    "network": (lambda: socket.getaddrinfo("127.0.0.1", 9), AssertionError, "getaddrinfo"),
    "outside": (lambda: open("outside.json").close(), AssertionError, "touched.*outside.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, folder, monkeypatch):
    act, kind, message = FAULTS[fault]
    file = folder / "number.json"
    file.write_text("0")
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(checking, "_MEBIBYTES", 32)
    if fault == "slow":
        monkeypatch.setattr(checking, "_SECONDS", 0.2)

    def parse() -> None:
        if json.loads(file.read_text()) > 80:
            act()

    inputs = in_file(file.name, st.integers(0, 100).map(lambda number: str(number).encode()))
    with pytest.raises(kind, match=message):
        check(folder, parse, inputs, file.name)
