"""`paddle-vl serve` beside `transformers serve`: first tokens, tokens per second, memory.

    python tools/benchmarks/openai_server.py
    python tools/benchmarks/openai_server.py --against PYTHON

PYTHON has torch and `transformers[serving]`, in an environment of its own. Both serve the model of
`configs/bench/qwen3_vl_step.yaml` with random weights, in float32 and with the same threads, from
one folder. Clients of the `openai` package ask greedily, each again as soon as it has its answer,
about a picture that nobody else has. Servers run in turn, in processes of their own; the clients
have one, on the same cores.
"""

import argparse
import asyncio
import base64
import io
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import export
import harness
from harness import Result, Table

OURS, HF = "paddle-vl", "transformers"
# Tokens of a prompt with its answer, at most; requests of a load, at least.
_TOKENS_OF_CLIENT, _FEWEST = 192, 16
# Before memory is read: what a server keeps, not what its last answers needed.
_IDLE_S = 3.0
QUESTION = "Which digit is this? Describe the picture, the paper and the ink. " * 4


def write_model(work: str) -> dict[str, Any]:
    """A folder of a model whose most likely tokens are words, so that answers have their length and
    pieces of text come with every token."""
    import paddle

    from paddle_vl.compat import configure_cpu_runtime

    configure_cpu_runtime(1)
    model, processor = export.qwen3_vl(Path(work))
    weight_VD = model.lm_head.weight
    texts = [processor.decode([token]) for token in range(weight_VD.shape[0])]
    is_word_V = np.array([text.isascii() and text.strip().isalpha() for text in texts])
    with paddle.no_grad():
        weight_VD.set_value(weight_VD * paddle.to_tensor(is_word_V.astype(np.float32)[:, None]))
    folder = Path(work) / "model"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return {}


def start(options: argparse.Namespace, side: str, model: str) -> AbstractContextManager[Any]:
    """The server of a side."""
    threads = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    address = r"http://\S+:\d+"
    if side == OURS:
        command = [sys.executable, "-m", "paddle_vl", "serve", model, "--port", "0"]
        # Memory for the keys of all clients at once.
        command += ["--kv-cache-tokens", str(max(options.clients) * _TOKENS_OF_CLIENT)]
        return started(command, address, address, **threads)
    # Its continuous batching is for models without images.
    command = [options.against, "-m", "transformers.cli.transformers", "serve", model]
    command += ["--port", "0", "--device", "cpu", "--dtype", "float32"]
    return started(command, address, rf"running on {address}", PYTHONUNBUFFERED="1", **threads)


@contextmanager
def started(
    command: Sequence[str], address: str, ready: str, **environment: str
) -> Iterator[tuple[str, int]]:
    """The address of a server that is ready, and its process number.

    Args:
        address: pattern of it in what the server says.
        ready: pattern of the line that says that it is.

    Raises:
        RuntimeError: it ended before; has the end of its output.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(harness.ROOT), **environment},
    )
    assert process.stdout is not None
    found, said = "", []
    try:
        for line in process.stdout:
            said.append(line)
            match = re.search(address, line)
            found = match.group() if match else found
            if re.search(ready, line):
                break
        else:
            raise RuntimeError("".join(said[-20:]))
        # A full pipe would stop it.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield found, process.pid
    finally:
        process.terminate()
        process.wait()


def picture(number: int, side: int) -> str:
    """A data URI of a picture of its own."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


async def ask(client: Any, model: str, number: int, options: argparse.Namespace) -> Any:
    """Seconds to the first piece of text, in all, and tokens of an answer."""
    image = {"type": "image_url", "image_url": {"url": picture(number, options.side)}}
    content = [image, {"type": "text", "text": QUESTION}]
    begin, first, tokens = time.perf_counter(), None, 0
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], stream=True,
        temperature=0.0, max_tokens=options.tokens, stream_options={"include_usage": True},
    )  # fmt: skip
    async for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - begin
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return first, time.perf_counter() - begin, tokens


async def load(address: str, model: str, clients: int, options: argparse.Namespace) -> Any:
    """What `clients` see that ask `options.requests` times each, few of them more often."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=600) as api:
        numbers = iter(range(1000 * clients, 1000 * (clients + 1)))
        count = max(options.requests, _FEWEST // clients)

        async def one() -> list[Any]:
            return [await ask(api, model, next(numbers), options) for _ in range(count)]

        begin = time.perf_counter()
        of_clients = await asyncio.gather(*(one() for _ in range(clients)))
        seconds = time.perf_counter() - begin
    answers = [answer for each in of_clients for answer in each]
    firsts = [first for first, _, _ in answers if first is not None]
    return {
        "first_ms": 1e3 * statistics.median(firsts),
        "tokens": sum(tokens for *_, tokens in answers),
        "per_second": sum(tokens for *_, tokens in answers) / seconds,
        "answers": len(answers),
    }


def measure(options: argparse.Namespace, model: str, side: str) -> dict[str, Any]:
    """All loads of a server, the smallest one first, and its memory."""
    from paddle_vl.processes import resident_bytes

    with start(options, side, model) as (address, process):
        asyncio.run(load(address, model, 1, options))
        found = {str(n): asyncio.run(load(address, model, n, options)) for n in options.clients}
        time.sleep(_IDLE_S)
        return {**found, "mib": resident_bytes(process) / 2**20}


def compare(options: argparse.Namespace, work: Path) -> Result:
    """A row per side and number of clients."""
    harness.make_data("qwen3_vl", work / "data")
    harness.launch(write_model, work / "run", work=work)
    sides = [OURS, HF] if options.against else [OURS]
    model = str(work / "model")
    rounds = harness.in_rounds(sides, options.rounds, lambda side: measure(options, model, side))
    rows = []
    for clients in map(str, options.clients):
        for side in sides:
            numbers = [
                harness.median(rounds, side, clients, name) for name in ("first_ms", "per_second")
            ]
            faster = [
                "1" if side == OURS else harness.ratio(rounds, OURS, side, clients, "per_second")
            ]
            rows.append([f"{clients}: {side}", *(f"{each:.0f}" for each in numbers), *faster])
    note = (
        f"{options.requests} requests per client and {_FEWEST} at least, one picture of "
        f"{options.side} x {options.side} each, {options.tokens} tokens, "
        f"{options.threads} threads; "
        + ", ".join(f"{side} holds {harness.median(rounds, side, 'mib'):.0f} MiB" for side in sides)
        + f" after {_IDLE_S:.0f} idle seconds at the end."
    )
    columns = ["clients", "ms to the first token", "tokens per second", "ours to theirs"]
    return Result([Table("openai server", columns, rows, note)], rounds)


if __name__ == "__main__":
    made = harness.parser(__doc__)
    made.add_argument("--against", metavar="PYTHON", help="interpreter with transformers[serving]")
    made.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="(1 8 32)")
    harness.add_count(made, "requests", 2, "requests of each client")
    harness.add_count(made, "tokens", 32, "tokens of an answer")
    harness.add_count(made, "side", 224, "side of a picture, pixels")
    harness.add_count(made, "threads", 2, "threads of a server")
    harness.add_count(made, "rounds", 1, "rounds")
    sys.exit(harness.run(made, compare))
