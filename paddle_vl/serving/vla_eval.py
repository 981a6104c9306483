"""vla-eval's protocol, version 1: episodes of observations, each of which is answered.

Messages are maps of `type`, `payload`, `seq` and `timestamp`. A refused observation is answered
with an error and the connection stays; a malformed message ends it, with code 1000. `prefix_action`
and `delay` of an observation are extensions, which the capabilities of the hello name.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from paddle_vl.serving.msgpack_numpy import VLA_EVAL
from paddle_vl.serving.policy import PolicyActor
from paddle_vl.serving.transport import Peer, PeerLeftError, error_text

logger = logging.getLogger(__name__)
# The release of vla-eval whose messages these are.
_VERSIONS = {"harness_version": "0.8.0", "protocol_version": 1}
_FIELDS = ("type", "payload", "seq", "timestamp")
_TYPES = ("hello", "episode_start", "observation", "action", "episode_end", "error")


def usual_keys(cameras: Sequence[str]) -> dict[str, str]:
    """The policy's names by the keys of vla-eval's benchmarks, nested ones joined by "/"."""
    images = {f"images/{name}": name for name in cameras}
    return {"task_description": "prompt", "states": "state"} | images


def hello_of(actor: PolicyActor) -> dict[str, Any]:
    """What the server says of a policy."""
    state = {"name": "state", "dims": actor.state_dim, "format": "raw"}
    return {
        "model_server": type(actor.policy).__name__,
        "capabilities": actor.extensions(),
        "observation_params": {"send_state": True, "send_wrist_image": len(actor.cameras) > 1},
        "action_spec": {"actions": {"name": "raw", "dims": actor.action_dim, "format": "raw"}},
        "observation_spec": {
            "image": {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"},
            "state": state,
            "language": {"name": "language", "dims": 0, "format": "language"},
        },
    }


class VlaEvalProtocol:
    """Serves clients of the package vla-eval.

    Args:
        hello: the server's answer to a hello, beside the versions.
        chunk_size: actions of a chunk that are used, one for each observation; None to send whole
            chunks.
    """

    def __init__(self, actor: PolicyActor, hello: Mapping[str, Any], chunk_size: int | None = None):
        self._actor, self._hello, self._chunk_size = actor, _VERSIONS | dict(hello), chunk_size

    async def talk(self, peer: Peer) -> None:
        history, left, number = self._actor.new_history(), deque[np.ndarray](), 0
        async for data in peer:
            try:
                message = await asyncio.to_thread(_read, data)
            except ValueError as error:
                logger.warning("a connection ends: %s", error)
                return
            kind, payload = message["type"], message["payload"]
            send = partial(self._send, peer, message["seq"])
            if kind == "hello":
                await send("hello", self._hello)
            elif kind == "episode_start":
                left.clear()
                if history is not None:
                    history.clear()
            elif kind == "observation":
                try:
                    if left:
                        if history is not None:
                            await asyncio.to_thread(self._actor.observe, payload, history)
                        answer = {"actions": left.popleft()}
                    else:
                        prepare = partial(self._actor.request, payload, number, history)
                        answer = self._taken(await peer.answer(prepare), left)
                        number += 1
                except PeerLeftError:
                    return
                except Exception as error:
                    await send("error", {"error": f"observation_failed: {error_text(error)}"})
                else:
                    await send("action", answer)

    def _taken(self, answer: Mapping[str, Any], left: deque[np.ndarray]) -> dict[str, Any]:
        """What is sent of an answer; the actions after the first are kept if chunks are cut."""
        actions = np.asarray(answer["actions"], dtype=np.float32)
        if self._chunk_size is None or actions.ndim == 1:
            return {**answer, "actions": actions}
        left.extend(actions[: self._chunk_size])
        return {"actions": left.popleft()}

    async def _send(self, peer: Peer, seq: int, kind: str, payload: Mapping[str, Any]) -> None:
        values = kind, payload, seq, time.time()
        await peer.send(VLA_EVAL.pack(dict(zip(_FIELDS, values, strict=True))))


def _read(data: bytes | str) -> dict[str, Any]:
    """A message.

    Raises:
        ValueError: malformed.
    """
    message = VLA_EVAL.unpack(data)
    if not (
        isinstance(message, dict)
        and message.keys() >= {*_FIELDS}
        and message["type"] in _TYPES
        and isinstance(message["payload"], dict)
        and type(message["seq"]) is int
    ):
        raise ValueError(
            f"a message is a map of {', '.join(_FIELDS)}, of one of the types {', '.join(_TYPES)}, "
            f"with a map as its payload and a number as its seq, not {str(message)[:200]}"
        )
    return message
