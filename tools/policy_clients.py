"""The public clients of policy servers; runs in an environment of theirs, for check_policy_server.

    python tools/policy_clients.py PROTOCOL ws://HOST:PORT OBSERVATIONS.npz ACTIONS.npz

Sends every observation of the file and writes the actions of the answers, and what a refused
observation gave.
"""

import argparse
import asyncio
from typing import Any

import numpy as np


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("protocol", choices=("openpi", "vla-eval"))
    for name in ("address", "observations", "actions"):
        parser.add_argument(name)
    given = parser.parse_args()
    client = with_openpi if given.protocol == "openpi" else with_vla_eval
    actions, refusal = client(given.address, dict(np.load(given.observations)))
    np.savez(given.actions, actions=np.stack(actions), refusal=refusal)
