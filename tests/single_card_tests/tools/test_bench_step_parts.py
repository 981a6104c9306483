"""The parts of a step's time, from a trace of Paddle's profiler.

Guarantees: parts sum to the step; a kernel of the backward pass belongs to the layer or operation
whose forward pass made its node, also where the same Paddle operation serves several; functions in
C count as kernels; kernels that no pattern matches are shown; a step with another graph than the
labelled one is refused.
"""

import ctypes
from collections import Counter

import paddle
import pytest
from paddle import nn

import step_nodes
import step_trace
from paddle_vl.nn.attention import causal_attention
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.norm import RMSNorm
from paddle_vl.nn.operations import Operation, use_kernels

SLEEP_MS = 3


class Block(nn.Layer):
    def __init__(self, library):
        super().__init__()
        self.norm, self.first, self.last = RMSNorm(8, 1e-6), Linear(8, 8, True), Linear(8, 8, False)
        self.library = library

    def forward(self, x_BLD):
        self.library.usleep(1000 * SLEEP_MS)
        q_BLNH = self.first(self.norm(x_BLD)).reshape([2, 4, 2, 4])
        out_BLNH = causal_attention(q_BLNH, q_BLNH, q_BLNH)
        return x_BLD + self.last(out_BLNH.reshape([2, 4, 8]))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Nodes and trace of a step with Paddle's own operations, and the step."""
    with pytest.MonkeyPatch.context() as patch, use_kernels("plain"):
        patch.setattr(ctypes.CDLL, "__getitem__", ctypes.CDLL.__getitem__)
        patch.setattr(Operation, "__call__", Operation.__call__)
        step_nodes.mark()
        model, x_BLD = Block(ctypes.CDLL(None)), paddle.randn([2, 4, 8])
        step = lambda: model(model(x_BLD)).square().sum().backward()  # noqa: E731
        nodes, file = step_nodes.labelled(step), tmp_path_factory.mktemp("trace") / "trace.json"
        seconds = step_nodes.traced(step, file)
    return nodes, file, seconds


def kernels(found, part):
    return Counter(share.kernel.rpartition("/")[2] for share in found if share.part == part)


def test_the_parts_sum_to_the_step(recorded):
    nodes, file, seconds = recorded
    ms = step_trace.sums(step_trace.read(file, nodes))
    assert sum(ms.values()) == pytest.approx(1e3 * seconds, rel=0.02)
    assert min(ms[part] for part in ("linears", "attention", "norms", step_trace.REST)) > 0
    assert ms["rotary"] == ms["optimizer"] == 0


def test_kernels_of_the_backward_pass_belong_to_what_made_their_node(recorded):
    nodes, file, _ = recorded
    found = step_trace.read(file, nodes)
    # Two blocks: linears have a product each, attention has scores and values.
    assert kernels(found, "linears")["matmul_grad"] == 2 * 2
    assert kernels(found, "attention")["matmul_grad"] == 2 * 2
    assert kernels(found, "attention")["softmax_grad"] == 2
    norm_of_input, norm_of_weight = 1, 1
    assert kernels(found, "norms")["multiply_grad"] == 2 * (norm_of_input + norm_of_weight)
    (path,) = {share.kernel for share in found if share.kernel.endswith("/softmax_grad")}
    assert path == "/Block/operation causal_attention/softmax_grad"


def test_a_function_in_c_counts_and_what_no_pattern_matches_is_shown(recorded):
    nodes, file, _ = recorded
    found = step_trace.read(file, nodes)
    ((kernel, ms),) = step_trace.unclassified(found).items()
    assert kernel == "/Block/function usleep"
    assert ms == step_trace.sums(found)[step_trace.UNCLASSIFIED] >= 2 * SLEEP_MS


def test_a_step_with_another_graph_is_refused(recorded):
    nodes, file, _ = recorded
    with pytest.raises(ValueError, match="backward does not visit Node"):
        step_trace.read(file, [*nodes, nodes[-1]])
    with pytest.raises(ValueError, match="backward visits .* where the labelled step visited"):
        step_trace.read(file, nodes[1:])
