"""A policy behind `paddle-vl serve-policy`: time per chunk, and sixteen clients at once.

    python tools/benchmarks/policy_server.py
    python tools/benchmarks/policy_server.py --seconds 60 --clients 16

The policy is that of `configs/bench/pi07_step.yaml`, in float32, as a saved policy, as exported
programs and in ONNX. One client asks again and again; then many do, each as soon as it has its
answer. Clients speak openpi's protocol over loopback, from threads of this process, which has the
same cores as the server. A request is lost if it gets no answer; memory is the server's, at the
half and at the end of the time.
"""

import argparse
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import export
import harness
from harness import Result, Table
from served import served

SIDES = {
    export.DYNAMIC: ("saved", "paddle"),
    export.STATIC: ("exported", "paddle"),
    export.ONNX: ("exported", "onnxruntime"),
}
WARM_UP = 3


def write_policies(work: str, num_threads: int, with_onnx: bool) -> dict[str, Any]:
    """Write the policy, and its programs."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.export.pi07.programs import policy_to_export
    from paddle_vl.export.writing import export_model

    configure_cpu_runtime(num_threads)
    policy, folder = export.pi07(Path(work)), Path(work)
    policy.save_pretrained(folder / "saved")
    export_model(policy_to_export(policy), folder / "saved", folder / "exported", onnx=with_onnx)
    return {}


class Client:
    """One client with its connection.

    Attributes:
        seconds: of every answer, at the client.
        answers: the timings and sizes that the server tells.
        lost: requests without an answer.
    """

    def __init__(self, address: str, seed: int, stack: ExitStack):
        from websockets.sync.client import connect

        from paddle_vl.serving.msgpack_numpy import OPENPI

        self._dialect, rng = OPENPI, np.random.default_rng(seed)
        self._connection = stack.enter_context(connect(address, compression=None, max_size=None))
        self._connection.recv(60)
        images = rng.integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
        observation = {"observation/image": images[0], "observation/wrist_image": images[1]}
        observation |= {"observation/state": rng.normal(size=32), "prompt": "move to the mark " * 3}
        self._message = OPENPI.pack(observation)
        self.seconds: list[float] = []
        self.answers: list[dict[str, float]] = []
        self.lost = 0

    def ask(self) -> None:
        begin = time.perf_counter()
        self._connection.send(self._message)
        answer = self._connection.recv(60)
        self.seconds.append(time.perf_counter() - begin)
        if isinstance(answer, str):
            self.lost += 1
        else:
            self.answers.append(self._dialect.unpack(answer)["policy_timing"])

    def ask_until(self, end: float) -> None:
        # The server closes the connection of a lost request.
        while time.perf_counter() < end and not self.lost:
            self.ask()


def measure(options: argparse.Namespace, work: Path, side: str) -> dict[str, Any]:
    """Times of one client, and of many; memory of the server."""
    from paddle_vl.processes import resident_bytes

    folder, runtime = SIDES[side]
    with (
        served(str(work / folder), "--runtime", runtime) as (address, process),
        ExitStack() as stack,
    ):
        alone = Client(address, 0, stack)
        for _ in range(WARM_UP + options.repeats):
            alone.ask()
        clients = [Client(address, seed, stack) for seed in range(options.clients)]
        begin, memory = time.perf_counter(), []
        half = threading.Timer(options.seconds / 2, lambda: memory.append(resident_bytes(process)))
        half.start()
        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(lambda each: each.ask_until(begin + options.seconds), clients))
        seconds = time.perf_counter() - begin
        memory.append(resident_bytes(process))
    waits = [wait for client in clients for wait in client.seconds]
    answers = [answer for client in clients for answer in client.answers]
    return {
        "one": _quantiles(alone.seconds[WARM_UP:]),
        "policy": statistics.median(a["infer_ms"] for a in alone.answers[WARM_UP:]),
        "many": _quantiles(waits),
        "asked": len(waits),
        "lost": sum(client.lost for client in clients),
        "per_second": len(answers) / seconds,
        # Every sample tells the size of its batch.
        "batch": len(answers) / sum(1 / answer["batch_size"] for answer in answers),
        "memory_mib": [found / 2**20 for found in memory],
    }


def _quantiles(seconds: list[float]) -> list[float]:
    """Median and 95th percentile in ms."""
    return [1e3 * float(value) for value in np.percentile(seconds, (50, 95))]


def compare(options: argparse.Namespace, work: Path) -> Result:
    """A row per side."""
    harness.make_data("pi07", work / "data", *harness.BENCH_DATA["pi07"])
    harness.launch(
        write_policies,
        work / "run",
        work=work,
        threads=options.threads,
        num_threads=options.threads,
        with_onnx=not options.no_onnx,
    )
    sides = [side for side in SIDES if not (options.no_onnx and side == export.ONNX)]
    found = {side: measure(options, work, side) for side in sides}
    one = [
        [side, *(f"{value:.1f}" for value in (*of["one"], of["policy"]))]
        for side, of in found.items()
    ]
    many = [
        [
            side,
            f"{of['asked']}",
            f"{of['lost']}",
            f"{of['per_second']:.1f}",
            *(f"{value:.0f}" for value in of["many"]),
            f"{of['batch']:.1f}",
            *(f"{value:.0f}" for value in of["memory_mib"]),
        ]
        for side, of in found.items()
    ]
    note = (
        "Two cameras of 224 x 224, 5 Euler steps, 50 actions of 32 dims, float32, "
        f"{options.repeats} chunks after {WARM_UP}."
    )
    columns = ["one client", "ms per chunk, median", "95 %", "of it in the policy"]
    tables = [Table("policy server", columns, one, note)]
    columns = [
        f"{options.clients} clients, {options.seconds} s", "requests", "lost", "chunks per second",
        "ms per chunk, median", "95 %", "requests of a batch", "MiB at the half", "MiB at the end",
    ]  # fmt: skip
    tables.append(Table("policy server load", columns, many))
    return Result(tables, found, is_good=not any(of["lost"] for of in found.values()))


if __name__ == "__main__":
    made = harness.parser(__doc__)
    harness.add_count(made, "repeats", 20, "chunks of one client")
    harness.add_count(made, "clients", 16, "clients at once")
    harness.add_count(made, "seconds", 60, "seconds that they ask")
    harness.add_count(made, "threads", 2, "threads that write the programs")
    made.add_argument("--no-onnx", action="store_true", help="leave onnxruntime out")
    sys.exit(harness.run(made, compare))
