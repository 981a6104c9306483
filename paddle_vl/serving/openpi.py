"""openpi's protocol: metadata, then an answer to every observation.

The server speaks first. A failure is a text message, after which the connection is closed with
code 1011. `prefix_action` and `delay` of an observation are extensions, which the metadata name.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from paddle_vl.serving.batching import ActorRequest
from paddle_vl.serving.msgpack_numpy import OPENPI
from paddle_vl.serving.policy import PolicyActor
from paddle_vl.serving.transport import Peer, PeerLeftError, error_text

_FAILED = 1011
_REASON = "Internal server error. Traceback included in previous frame."


def usual_keys(cameras: Sequence[str]) -> dict[str, str]:
    """The policy's names by the keys of openpi's clients, whose robots have a camera and a second
    one at the wrist."""
    keys = {f"observation/{name}": name for name in ("state", *cameras)}
    return keys | dict(zip(("observation/image", "observation/wrist_image"), cameras, strict=False))


def metadata_of(actor: PolicyActor) -> dict[str, Any]:
    """What the server says of a policy."""
    return actor.description() | {"extensions": actor.extensions()}


class OpenpiProtocol:
    """Serves clients of the package openpi-client.

    Args:
        metadata: the server's first message.
    """

    def __init__(self, actor: PolicyActor, metadata: Mapping[str, Any]):
        self._actor, self._hello = actor, OPENPI.pack(metadata)

    async def talk(self, peer: Peer) -> None:
        await peer.send(self._hello)
        previous: dict[str, float] = {}
        number = 0
        async for message in peer:
            begin = time.monotonic()
            try:
                answer = dict(await peer.answer(partial(self._request, message, number)))
            except PeerLeftError:
                return
            except Exception as error:
                await peer.send(f"{error_text(error)}\n")
                await peer.close(_FAILED, _REASON)
                return
            answer["server_timing"] = {"infer_ms": _ms_since(begin)} | previous
            await peer.send(OPENPI.pack(answer))
            previous = {"prev_total_ms": _ms_since(begin)}
            number += 1

    def _request(self, message: bytes | str, number: int) -> ActorRequest:
        observation = OPENPI.unpack(message)
        if not isinstance(observation, dict):
            found = type(observation).__name__
            raise ValueError(f"an observation is a map by names, not {found}")
        return self._actor.request(observation, number)


def _ms_since(begin: float) -> float:
    return (time.monotonic() - begin) * 1000
