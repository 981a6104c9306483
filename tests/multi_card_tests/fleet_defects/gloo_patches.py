"""Methods of gloo groups that only the tests of fleet's defects need."""

import paddle

from paddle_vl.parallel.gloo_fleet.patch import GROUP, NOT_IN_GLOO, Patch
from paddle_vl.parallel.gloo_fleet.process_group import (
    DONE,
    all_gather_into_tensor,
    all_reduce,
    recv,
    send,
    write,
)


def _flat_slice(tensor, num, id):
    length = tensor.size // num
    return tensor.reshape([-1])[id * length : (id + 1) * length]


@paddle.no_grad()
def _reduce(group, tensor, dst, op, sync_op=True):
    result = tensor.clone()
    all_reduce(group, result, op)
    if group.rank() == dst:
        write(result, tensor)
    return DONE


def _send_partial(group, tensor, dst, num, id):
    return send(group, _flat_slice(tensor, num, id), dst)


@paddle.no_grad()
def _recv_partial(group, tensor, src, num, id):
    own = _flat_slice(tensor, num, id).clone()
    recv(group, own, src)
    slices = [own if i == id else _flat_slice(tensor, num, i) for i in range(num)]
    write(paddle.concat(slices), tensor)
    return DONE


def _all_gather_partial(group, out, in_, num, id):
    return all_gather_into_tensor(group, out, _flat_slice(in_, num, id))


def install_more() -> None:
    """Install them, after `paddle_vl.parallel.gloo_fleet.install`."""
    functions = {
        "reduce": _reduce,
        "send_partial_on_calc_stream": _send_partial,
        "recv_partial_on_calc_stream": _recv_partial,
        "all_gather_partial_on_calc_stream": _all_gather_partial,
    }
    for name, function in functions.items():
        Patch(GROUP, name, NOT_IN_GLOO, lambda _, function=function: function).apply()
