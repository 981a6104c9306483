"""Golden cases as on other processors.

Guarantees: the golden cases pass with the vector instructions of before AVX-512, with one thread
and with two, with the compiled kernels and without. (A tolerance that is taken from one processor's
rounding fails on another.)
"""

import pytest

from check_parity import PROCESSORS
from tests.support import forked
from tests.support.forked import ROOT
from tests.support.tiny import GOLDEN

FAMILIES = ["qwen_vl", "qwen3_5", "qwen4_exp", "pi07", "preference"]
TOOL = str(ROOT / "tools" / "check_parity.py")


def assert_passes(family: str, *arguments: str, **environment: str) -> None:
    command = [TOOL, family, str(GOLDEN / family), *arguments]
    done = forked.run(command, environment=environment, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("family", ["qwen_vl", "qwen3_5"])
def test_golden_cases_pass_with_older_instructions(family):
    assert_passes(family, "--kernels", "fused", **PROCESSORS["AVX2"])


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_golden_cases_pass_on_all_processors(family):
    assert_passes(family, "--processors")
