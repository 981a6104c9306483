"""Check a served policy with the clients that robots use: openpi-client and vla-eval.

    python tools/check_policy_server.py MODEL [--environments DIR]

Each client gets an environment of its own, which is made if DIR has none (from PyPI), since
openpi-client needs NumPy 1. It asks `paddle-vl serve-policy` for a few chunks; these must be the
policy's own, and a wrong observation must be refused as the client expects it. Prints a line for
each protocol; the exit code is 1 if anything differs.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.served import served

ROOT = Path(__file__).resolve().parents[1]
# The first imports the second, which it does not declare.
PACKAGES = {
    "openpi": ("openpi-client==0.1.2", "typing_extensions"),
    "vla-eval": ("vla-eval==0.8.0",),
}
NUM_OBSERVATIONS = 4
TOLERANCE = 1e-5


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
    with tempfile.TemporaryDirectory() as work, served(model, *options) as (at, _):
        files = [str(Path(work) / name) for name in ("observations.npz", "actions.npz")]
        np.savez(files[0], **given)  # pyright: ignore[reportArgumentType]
        python, script = client_python(protocol, environments), ROOT / "tools" / "policy_clients.py"
        subprocess.run([python, str(script), protocol, at, *files], check=True)
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
    options = parser.parse_args()

    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.serving import openpi
    from paddle_vl.serving.policy import ObservationKeys, PolicyActor, open_policy

    configure_cpu_runtime()
    policy = open_policy(Path(options.model), "paddle")
    actor = PolicyActor(policy, ObservationKeys(values={"dataset_index": 0}), openpi.usual_keys)
    with tempfile.TemporaryDirectory() as folder:
        environments = options.environments or Path(folder)
        lines = [check(each, options.model, environments, actor) for each in PACKAGES]
    print("\n".join(lines))
    return int(any("differs" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
