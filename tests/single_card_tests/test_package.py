"""The installed package.

Guarantees: without Paddle the import names the wheels to choose from; neither torch nor
transformers is required, directly or through a dependency; public names are found, others refused;
AMD processors get their own code path in Paddle's matrix library.
"""

import re
import subprocess
import sys
from importlib import metadata

import pytest

import paddle_vl
from paddle_vl.compat import amd_instruction_set

_IMPORT_WITHOUT_PADDLE = """
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "paddle" else find(name, *rest)
import paddle_vl
"""


def test_importing_without_paddle_names_both_wheels():
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_WITHOUT_PADDLE], capture_output=True, text=True
    )
    assert done.returncode == 1
    message = done.stderr.split("ImportError: ")[1]
    assert "paddle-vl[cpu]" in message
    assert "paddle-vl[gpu]" in message


def required_names(name: str, seen: set[str]) -> set[str]:
    """Distributions that `name` requires, directly or indirectly, without extras."""
    for requirement in metadata.requires(name) or []:
        if "extra ==" in requirement:
            continue
        required = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower().replace("_", "-")
        if required not in seen:
            seen.add(required)
            try:
                required_names(required, seen)
            except metadata.PackageNotFoundError:
                # Required only on another system or Python.
                continue
    return seen


def test_neither_torch_nor_transformers_is_required():
    names = required_names("paddle-vl", {"paddlepaddle"}) | required_names("paddlepaddle", set())
    assert {"numpy", "tokenizers", "pydantic"} <= names
    assert not names & {"torch", "transformers", "torchvision", "lerobot", "paddlenlp"}


def test_public_names_are_found_and_others_refused():
    for name in paddle_vl.__all__:
        # HF's name of the processor is another name of the shared one.
        own = {"Qwen3VLProcessor": "VLProcessor"}.get(name, name)
        assert getattr(paddle_vl, name).__name__ == own
    with pytest.raises(AttributeError, match="no attribute 'Qwen9'.*Qwen3VLConfig"):
        _ = paddle_vl.Qwen9


@pytest.mark.parametrize(
    ("vendor", "flags", "wanted"),
    [
        ("AuthenticAMD", "fma avx2 avx512f avx512dq avx512bw avx512vl sse", "7"),
        ("AuthenticAMD", "fma avx2 avx512f sse", "5"),
        ("AuthenticAMD", "sse sse2", None),
        ("GenuineIntel", "fma avx2 avx512f avx512dq avx512bw avx512vl sse", None),
    ],
)
def test_amd_processors_get_their_widest_instructions(vendor, flags, wanted, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(f"vendor_id\t: {vendor}\nflags\t\t: {flags} \n")
    assert amd_instruction_set(file) == wanted
    assert amd_instruction_set(tmp_path / "absent") is None
