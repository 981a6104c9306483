"""vLLM in the environment of the interpreter VLLM_PYTHON (tools/check_vllm.py says how to make it),
and its server in a process of its own."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from check_vllm import ENVIRONMENT

PYTHON = os.environ.get("VLLM_PYTHON")
# vLLM has no wheel for the CPU under its own name, so nothing here installs it.
needs_vllm = [
    pytest.mark.heavy,
    pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no interpreter with vLLM"),
]
# Of attention, as vLLM's kernels on the CPU have it.
SIZES = {
    "head_dim": 32,
    "num_attention_heads": 4,
    "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]},
}
_DEV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_WAIT_S = 300


@contextmanager
def vllm_server(folder: Path, *options: str) -> Iterator[str]:
    """The address of vLLM's server of a folder, as `policy`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "policy", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-batched-tokens", "8192"]
    command += ["--mm-processor-kwargs", '{"use_fast": false}', *options]
    log = folder.with_name("vllm.log")
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT | _DEV, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        end = time.monotonic() + _WAIT_S
        while True:
            is_over = server.poll() is not None or time.monotonic() > end
            assert not is_over, log.read_text()[-4000:]
            try:
                with urlopen(f"http://127.0.0.1:{port}/health"):
                    break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()
