"""Check a served policy with the clients that robots use: openpi-client and vla-eval.

    python tools/check_policy_server.py MODEL [--environments DIR]

Each client gets an environment of its own, which is made if DIR has none (from PyPI), since
openpi-client needs NumPy 1; there this file runs again, as the client. It asks
`paddle-vl serve-policy` for a few chunks; these must be the policy's own, and a wrong observation
must be refused as the client expects it. Prints a line for each protocol; the exit code is 1 if
anything differs.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# The first imports the second, which it does not declare.
PACKAGES = {
    "openpi": ("openpi-client==0.1.2", "typing_extensions"),
    "vla-eval": ("vla-eval==0.8.0",),
}
NUM_OBSERVATIONS = 4
TOLERANCE = 1e-5


@contextmanager
def served(model: str, *options: str) -> Iterator[str]:
    """The address of a server that is ready.

    Raises:
        RuntimeError: it ended before; has its output.
    """
    command = [sys.executable, "-m", "paddle_vl", "serve-policy", model, "--port", "0", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = ""
        try:
            while not re.search("^ready", said, re.M):
                if not (line := process.stdout.readline()):
                    raise RuntimeError(said)
                said += line
            # A full pipe would stop it.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield re.findall(r"ws://\S+:\d+", said)[0]
        finally:
            process.terminate()


def with_openpi(address: str, seen: dict[str, np.ndarray]) -> tuple[list[np.ndarray], str]:
    from openpi_client.websocket_client_policy import (  # pyright: ignore[reportMissingImports]
        WebsocketClientPolicy,
    )

    policy = WebsocketClientPolicy(host=address)
    cameras = list(policy.get_server_metadata()["cameras"])
    keys = dict(zip(cameras, ("observation/image", "observation/wrist_image"), strict=False))
    found = []
    for state, *images in zip(seen["state"], *(seen[name] for name in cameras), strict=True):
        observation = {keys.get(n, n): image for n, image in zip(cameras, images, strict=True)}
        observation |= {"observation/state": state, "prompt": str(seen["prompt"])}
        found.append(policy.infer(observation)["actions"])
    try:
        policy.infer({"prompt": ""})
    except RuntimeError as error:
        return found, str(error)
    return found, "no error"


def with_vla_eval(address: str, seen: dict[str, np.ndarray]) -> tuple[list[np.ndarray], str]:
    from vla_eval.connection import Connection  # pyright: ignore[reportMissingImports]

    cameras = [name for name in seen if name not in ("state", "prompt")]

    async def run() -> tuple[list[np.ndarray], str]:
        found: list[np.ndarray] = []
        async with Connection(address) as connection:
            await connection.start_episode({"task": {"name": "check"}})
            for i, state in enumerate(seen["state"]):
                images = {name: seen[name][i] for name in cameras}
                observation: dict[str, Any] = {"images": images, "state": state}
                observation["task_description"] = str(seen["prompt"])
                found.append((await connection.act(observation))["actions"])
            try:
                await connection.act({"images": {}})
            except RuntimeError as error:
                return found, str(error)
        return found, "no error"

    return asyncio.run(run())


def client_python(protocol: str, folder: Path) -> str:
    """The interpreter of a client's environment; makes it if it is not there."""
    python = folder / protocol / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / protocol], check=True)
        install = [python, "-m", "pip", "install", "--quiet", *PACKAGES[protocol]]
        subprocess.run(install, check=True)
    return str(python)


def observations(actor: Any) -> dict[str, np.ndarray]:
    """Some observations, by the policy's names."""
    rng = np.random.default_rng(0)
    shape = (NUM_OBSERVATIONS, 120, 160, 3)
    found = {name: rng.integers(0, 256, shape, dtype=np.uint8) for name in actor.cameras}
    state = rng.normal(size=(NUM_OBSERVATIONS, actor.state_dim)).astype(np.float32)
    return found | {"state": state, "prompt": np.array("reach the mark")}


def check(protocol: str, model: str, environments: Path, actor: Any) -> str:
    """What a client found; says "differs" if that is not right."""
    given = observations(actor)
    options = ("--protocol", protocol, "--value", "dataset_index=0")
    with tempfile.TemporaryDirectory() as work, served(model, *options) as at:
        files = [str(Path(work) / name) for name in ("observations.npz", "actions.npz")]
        np.savez(files[0], **given)  # pyright: ignore[reportArgumentType]
        command = [client_python(protocol, environments), __file__, at, "--client", protocol]
        subprocess.run([*command, *files], check=True)
        found = dict(np.load(files[1]))
    history = actor.new_history() if protocol == "vla-eval" else None
    worst = 0.0
    for number, actions in enumerate(found["actions"]):
        seen = {name: values[number] for name, values in given.items() if name != "prompt"}
        request = actor.request(seen | {"prompt": str(given["prompt"])}, number, history)
        (wanted,) = actor.run([request.item])
        worst = max(worst, float(np.abs(actions - wanted["actions"]).max()))
    refusal = str(found["refusal"])
    is_right = worst <= TOLERANCE and "the observation lacks" in refusal
    verdict = "the policy's" if is_right else "differs"
    last = refusal.strip().splitlines()[-1]
    return f"{PACKAGES[protocol][0]}: {verdict}, by {worst:.1e} at most; refused: {last[:60]}..."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="a policy's folder, or an export folder")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="of the clients")
    # The process of a client; the model is then the address of its server.
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        protocol, given, out = options.client
        client = with_openpi if protocol == "openpi" else with_vla_eval
        actions, refusal = client(options.model, dict(np.load(given)))
        np.savez(out, actions=np.stack(actions), refusal=refusal)
        return 0

    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.serving import openpi
    from paddle_vl.serving.policy import PolicyActor, open_policy

    configure_cpu_runtime()
    policy = open_policy(Path(options.model), "paddle")
    actor = PolicyActor(policy, openpi.usual_keys, values={"dataset_index": 0})
    with tempfile.TemporaryDirectory() as folder:
        environments = options.environments or Path(folder)
        lines = [check(each, options.model, environments, actor) for each in PACKAGES]
    print("\n".join(lines))
    return int(any("differs" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
