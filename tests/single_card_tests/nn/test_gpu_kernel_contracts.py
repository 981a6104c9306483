"""The stand-ins of Paddle's GPU kernels, and which kernels the package and its models call.

Attention: the row intervals of every mask mean the same as its dense form, each form of attention
is one call of the version that is set, and the stubs notice each breach of a kernel's contract.
"""

import inspect
from collections import Counter
from functools import partial
from itertools import product

import numpy as np
import paddle
import paddle.incubate.nn.functional as incubate
import paddle.nn.functional as F
import pytest
from paddle import _C_ops
from paddle.nn.attention import SDPBackend, sdpa_kernel

from paddle_vl.batch.positions import segment_offsets
from paddle_vl.batch.row_slices import RowSlice
from paddle_vl.families.pi07.prefix import PREFIX_BLOCKS, PrefixTokens, Presence
from paddle_vl.nn.attention import (
    PackedSamples,
    RotaryTables,
    Segments,
    apply_rotary,
    causal_attention,
    masked_attention,
)
from paddle_vl.nn.attention_masks import (
    MASKED_SCORE,
    AttentionMask,
    BlockMask,
    HistoryMask,
    KeyMask,
    SliceMask,
)
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.experts import GroupSizes, grouped_linear
from paddle_vl.nn.operations import layer_norm, rms_norm
from paddle_vl.testing import (
    forbid_host_reads,
    record_host_reads,
    tiny_pi07,
    tiny_pi07_batch,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.gpu_stubs.attention import FLASH, visible_of_rows
from tests.support.gpu_stubs.contract import ContractError, halves_are
from tests.support.gpu_stubs.installed import CALLS, STANDINS
from tests.support.gpu_stubs.pretended import pretended_gpu


@pytest.fixture
def _kernels():
    with use_kernels("gpu"):
        yield


def draw(*shape, dtype="float32"):
    x = paddle.randn(list(shape), dtype=dtype)
    x.stop_gradient = False
    return x


@pytest.mark.parametrize("standin", STANDINS, ids=lambda standin: standin.name)
def test_a_standin_has_the_parameters_of_paddles_function(standin):
    assert callable(standin.own)
    if inspect.isbuiltin(standin.own):
        return
    own, mine = inspect.signature(standin.own), inspect.signature(standin.standin)
    assert list(own.parameters) == list(mine.parameters)
    for name, parameter in own.parameters.items():
        assert parameter.default == mine.parameters[name].default, name


def rotated(rows: int, **settings) -> None:
    """Queries of four rows, and tables of so many."""
    dtype = settings.pop("dtype", "float32")
    sin, cos = (paddle.rand([rows, 8]).astype(dtype) for _ in range(2))
    incubate.fused_rotary_position_embedding(draw(1, 4, 2, 8), sin=sin, cos=cos, **settings)


def normed(x, residual) -> None:
    incubate.fused_rms_norm(x, draw(8), None, 1e-6, 1, None, residual)


def multiplied(sizes, trains: bool = False) -> None:
    x, weight = draw(4, 8), draw(2, 8, 3)
    x.stop_gradient = weight.stop_gradient = not trains
    incubate.batched_gemm(x, weight, sizes)


HALVES: dict = {"use_neox_rotary_style": False}
REFUSED = {
    "a weight of another dtype": lambda: F.rms_norm(draw(4, 8), [8], draw(8, dtype="float64")),
    "no rows to normalize": lambda: F.rms_norm(draw(0, 8), [8], draw(8)),
    "a weight of another width": lambda: F.rms_norm(draw(4, 8), [8], draw(4)),
    "a residual of another shape": lambda: normed(draw(4, 8).detach(), draw(2, 8)),
    "a gradient of sum and norm": lambda: normed(draw(4, 8), draw(4, 8)),
    "a large epsilon": lambda: F.layer_norm(draw(4, 8), [8], draw(8), draw(8), 0.01),
    "tables of another dtype": lambda: rotated(4, dtype="float64", **HALVES),
    "tables of fewer rows": lambda: rotated(3, **HALVES),
    "pairs of neighbours": lambda: rotated(4),
    "numbers of rows on the device": lambda: multiplied(paddle.to_tensor([1, 3])),
    "numbers of other rows": lambda: multiplied([1, 2]),
    "a gradient of products": lambda: multiplied([1, 3], trains=True),
}


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("case", REFUSED)
def test_a_standin_refuses_what_the_kernel_refuses(case):
    with halves_are("float64"), pytest.raises(ContractError):
        REFUSED[case]()


@pytest.mark.usefixtures("_kernels")
def test_norms_that_no_kernel_takes_run_in_plain_operators():
    x, weight = draw(4, 8), draw(8, dtype="float64")
    with use_kernels("plain"):
        wanted = rms_norm(x, weight, 1e-6), layer_norm(x, draw(8) * 0 + 1, draw(8) * 0, 0.5)
    found = rms_norm(x, weight, 1e-6), layer_norm(x, draw(8) * 0 + 1, draw(8) * 0, 0.5)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.usefixtures("_kernels")
def test_rotary_tables_are_rounded_once_for_all_layers():
    tables = RotaryTables(paddle.rand([4, 8]), paddle.rand([4, 8]))
    q, k = draw(4, 2, 8, dtype="float64"), draw(4, 1, 8, dtype="float64")
    with halves_are("float64"):
        first = apply_rotary(q, k, tables)
        rounded = tables.astype(paddle.float64)
        apply_rotary(*first, tables)
    assert tables.astype(paddle.float64) is rounded


@pytest.fixture
def copies(monkeypatch):
    """Number of matrices in every copy that a product makes."""
    found, select = [], paddle.index_select

    def recording(x, index, *rest):
        if len(x.shape) == 3:
            found.append(index.shape[0])
        return select(x, index, *rest)

    monkeypatch.setattr(paddle, "index_select", recording)
    return found


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("counts", "matrices"),
    [
        ([40, 30, 30], []),
        # R = 128 rows: (384 - 1) // 128 blocks beyond the first of each expert.
        ([384, 0, 0], [2, 2]),
        ([100, 34, 250], [2, 2]),
        # More than a tile per expert, unread: R = 384, and (768 - 1) // 384 further blocks.
        ([700, 0, 68], [1, 1]),
    ],
    ids=str,
)
def test_matrices_are_copied_for_further_blocks_only(counts, matrices, copies):
    x, weight = draw(sum(counts), 4), draw(3, 4, 5)
    sizes = GroupSizes(paddle.to_tensor(counts), may_read=False)
    with forbid_host_reads():
        y = grouped_linear(x, weight, sizes)
        y.sum().backward()
    assert copies == matrices
    begins = np.cumsum([0, *counts])
    for e in range(3):
        rows = slice(begins[e], begins[e + 1])
        wanted = x.numpy()[rows] @ weight.numpy()[e]
        np.testing.assert_allclose(y.numpy()[rows], wanted, atol=1e-5)
        wanted = np.broadcast_to(x.numpy()[rows].sum(0)[:, None], (4, 5))
        np.testing.assert_allclose(weight.grad.numpy()[e], wanted, atol=1e-4)


@pytest.mark.usefixtures("_kernels")
def test_many_rows_are_multiplied_once_each_after_one_read(copies, monkeypatch):
    """More than a tile per expert: no padding, and no read in the backward pass or a later one."""
    counts, multiplied, product = [700, 0, 68], [], incubate.batched_gemm

    def counting(lhs, rhs, sizes, **how):
        multiplied.append(sum(sizes))
        return product(lhs, rhs, sizes, **how)

    monkeypatch.setattr(incubate, "batched_gemm", counting)
    x, weight = draw(768, 4), draw(3, 4, 5)
    sizes = GroupSizes(paddle.to_tensor(counts))
    with record_host_reads() as reads:
        y = grouped_linear(x, weight, sizes)
        grouped_linear(x, weight, sizes)
        y.sum().backward()
    assert len(reads) == 1
    assert multiplied == [768] * 4
    assert copies == []


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("counts", [[2, 0, 5, 1], [0, 0, 8, 0]], ids=str)
def test_numbers_of_rows_on_the_host_need_no_copy(counts, copies):
    results = []
    for on_host in (None, counts):
        paddle.seed(0)
        x, weight = draw(sum(counts), 4), draw(4, 4, 5)
        y = grouped_linear(x, weight, GroupSizes(paddle.to_tensor(counts), on_host))
        (y * y).sum().backward()
        results.append([y.numpy(), x.grad.numpy(), weight.grad.numpy()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert copies == []


BUILDS = {
    "qwen3_vl": tiny_qwen3_vl,
    "experts": partial(tiny_qwen3_vl, **EXPERTS),
    "pi07": tiny_pi07,
}
QWEN3_VL = {
    "layer_norm": 7, "rms_norm": 10, "fused_rms_norm": 3, "rms_norm_grad": 3,
    "fused_rotary_position_embedding": 10, "flash_attn_unpadded": 2, "flashmask_attention": 3,
}  # fmt: skip
COUNTS = {
    "qwen3_vl": QWEN3_VL,
    "experts": QWEN3_VL,
    "pi07": {
        "layer_norm": 7, "fused_rms_norm_ext": 27, "fused_rotary_position_embedding": 12,
        "flash_attn": 7, "flashmask_attention": 3,
    },
}  # fmt: skip


def calls_of(name: str) -> Counter:
    """Calls of each kernel in a forward and backward pass."""
    model = BUILDS[name]()
    begin = len(CALLS)
    with pretended_gpu() as attention:
        if name == "pi07":
            losses = model(tiny_pi07_batch())
            loss = losses["MSE"] + losses["CE"]
        else:
            loss = model(**tiny_qwen3_vl_batch()).loss
        loss.backward()
    return Counter([*CALLS[begin:], *(call.name for call in attention)])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", BUILDS)
def test_fused_kernels_of_a_model(name):
    assert dict(calls_of(name)) == COUNTS[name]


A100, H100 = ((8, 0), 2), ((9, 0), 3)


def drawn(*shape, seed=0):
    value = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return paddle.to_tensor(value, stop_gradient=False)


def all_rows(length: int) -> np.ndarray:
    """Every row of so many bools."""
    return np.array(list(product([False, True], repeat=length)))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_row_intervals_are_the_mask_of_all_blocks_and_all_padding(length):
    rows = all_rows(length)
    pad, marks = np.repeat(rows, len(rows), axis=0), np.tile(rows, [len(rows), 1])
    mask = BlockMask(paddle.to_tensor(pad), paddle.to_tensor(marks))
    found = visible_of_rows(mask.row_intervals().numpy(), length, causal=False)[:, 0]
    # Rows of padding are replaced afterwards.
    np.testing.assert_array_equal(found & pad[:, :, None], mask.visible_BLS.numpy())
    np.testing.assert_array_equal(mask.has_key_BL11.numpy()[..., 0, 0], pad)
    # The rule of the originals: earlier blocks and the own one, between real tokens.
    block = marks.cumsum(axis=1)
    wanted = (block[:, None] <= block[:, :, None]) & pad[:, None] & pad[:, :, None]
    np.testing.assert_array_equal(mask.visible_BLS.numpy(), wanted)


@pytest.mark.parametrize("presence", [Presence(*x) for x in product([False, True], repeat=3)])
def test_row_intervals_of_a_policys_prefix_with_drops_and_padding(presence):
    rng = np.random.default_rng(int("".join(map(str, map(int, presence))), 2))

    def masks(size):
        return paddle.to_tensor(rng.random((4, size)) < 0.7)

    def cameras():
        return [paddle.to_tensor(rng.random(4) < 0.7) for _ in range(2)]

    names = {"lang": 3, "response": 2, "metadata": 2}
    batch = {f"{name}_masks": masks(size) for name, size in names.items()}
    batch |= {name.replace("masks", "tokens"): value for name, value in batch.items()}
    batch |= {"vid_masks": cameras(), "subgoal_img_masks": cameras(), "subgoal_images": [1]}
    batch |= {"state": paddle.zeros([4, 3, 2]), "obs_history_is_pad": masks(3)}
    batch |= {"discrete_actions": masks(4), "discrete_action_masks": masks(4)}
    labels = {b.text: [1, 2] for b in PREFIX_BLOCKS if b.source.name == "LABEL"}
    tokens = PrefixTokens(PREFIX_BLOCKS, labels, camera_tokens=3)
    pad, marks, *_ = tokens.masks(batch, presence)
    mask = BlockMask(pad, marks)
    found = visible_of_rows(mask.row_intervals().numpy(), pad.shape[1], causal=False)[:, 0]
    visible = mask.visible_BLS.numpy()
    np.testing.assert_array_equal(found & pad.numpy()[:, :, None], visible)
    assert 0 < visible.sum() < visible.size


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
@pytest.mark.parametrize("copies", [1, 3])
def test_a_video_in_one_row_sees_what_each_patch_saw(frames, copies):
    real = all_rows(frames)
    mask = HistoryMask(paddle.to_tensor(real), copies)
    ends = mask.row_ends_V1R1.numpy()
    found = visible_of_rows(ends, copies * frames, causal=True)[:, 0]
    wanted = np.zeros_like(found)
    visible = mask.visible_BLS.numpy().reshape([len(real), copies, frames, frames])
    for copy in range(copies):
        part = slice(copy * frames, (copy + 1) * frames)
        wanted[:, part, part] = visible[:, copy]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("machine", "names"), [
    (A100, ["flash_attn", "flash_attn", "flashmask_attention", "flashmask_attention",
            "flash_attn_unpadded", "flash_attn", "flash_attn"]),
    (H100, ["flash_attn_v3", "flash_attn_v3", "flashmask_attention_v2", "flashmask_attention_v2",
            "flash_attn_v3_varlen", "flash_attn_v3", "flash_attn"]),
])  # fmt: skip
def test_each_form_of_attention_is_one_call_of_the_version_that_is_set(machine, names):
    q, k = drawn(3, 5, 4, 8), drawn(3, 5, 2, 8)
    packed = PackedSamples(segment_offsets([[3, 2], [4], [1, 1]], 5), 5)
    rows = drawn(15, 4, 8)
    with pretended_gpu(*machine) as calls:
        causal_attention(q, k, k)
        causal_attention(q[:, :1], k, k)
        causal_attention(q, k, k, packed=packed)
        causal_attention(q, k, k, paddle.to_tensor([[0.0] * 5, [MASKED_SCORE] * 5, [0.0] * 5]))
        Segments([(2, 4), (1, 7)]).attend(rows, rows, rows)
        Segments([(3, 5)]).attend(rows, rows, rows)
        # A dense mask is for version 2 alone.
        causal_attention(q[:, :2], k, k)
    assert [call.name for call in calls] == names
    assert [call.details.get("causal") for call in calls[:4]] == [True, False, True, True]
    assert calls[4].shapes[3] == (4,)
    assert calls[4].details == {"longest": 7}
    # `[B, 1, L, S]`: the kernel does not broadcast over the batch.
    assert calls[6].shapes[3] == (3, 1, 2, 5)


def test_repeatable_runs_leave_version_3_where_it_has_no_repeatable_kernel():
    q, rows = drawn(1, 4, 2, 8), drawn(4, 2, 8)
    packed = PackedSamples(segment_offsets([[3, 1]], 4), 4)
    with pretended_gpu(*H100, deterministic=True) as calls:
        causal_attention(q, q, q)
        Segments([(1, 1), (1, 3)]).attend(rows, rows, rows)
        causal_attention(q, q, q, packed=packed)
    names = [call.name for call in calls]
    assert names == ["flash_attn", "flash_attn_unpadded", "flashmask_attention_v2"]


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_masks_with_structure_equal_their_dense_form(kind, key_heads):
    """Values and gradients, and the kernel that runs."""
    rng = np.random.default_rng(3)
    pad, marks = (paddle.to_tensor(rng.random((3, 7)) < 0.6) for _ in range(2))
    seen = paddle.concat([pad, paddle.ones([3, 2], "bool")], axis=1)
    real = paddle.to_tensor(rng.random((3, 4)) < 0.6)
    rows = paddle.to_tensor(RowSlice.of(np.array([0, 3, 8]), 1, 2).key_rows)
    for mask, batch, length, keys, kernel in (
        (BlockMask(pad, marks), 3, 7, 7, "flashmask_attention"),
        (KeyMask(seen, 2), 3, 2, 9, "flash_attn"),
        (HistoryMask(real, 2), 6, 4, 4, "flashmask_attention"),
        (SliceMask(rows, 4), 1, 4, 8, "flashmask_attention"),
    ):
        q = drawn(batch, length, 2, 8, seed=1)
        k, v = (drawn(batch, keys, key_heads, 8, seed=s) for s in (2, 3))
        weight = drawn(batch, length, 2, 8, seed=4).detach()
        results = []
        for each in (mask, AttentionMask(mask.visible_BLS)):
            with pretended_gpu() as calls:
                out = masked_attention(q, k, v, each, 0.7, kind)
                grads = paddle.grad((out * weight).sum(), [q, k, v])
            results.append([x.numpy() for x in (out, *grads)])
            if each is mask:
                assert [call.name for call in calls] == [kernel]
        for found, wanted in zip(*results, strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-5)
    # A suffix gives one row of bias, not one for each query.
    with pretended_gpu() as calls:
        masked_attention(drawn(3, 2, 2, 8), drawn(3, 9, 2, 8), drawn(3, 9, 2, 8),
                         KeyMask(seen, 2), 0.7, kind)  # fmt: skip
    assert calls[0].shapes[3] == (3, 1, 1, 9)


def test_past_frames_are_one_entry_per_video_however_many_patches():
    """As entries of a batch, 300 videos of 256 patches do not fit a grid's y dimension."""
    real, copies = paddle.ones([300, 1], "bool"), 256
    q = drawn(300 * copies, 1, 1, 8)
    with pretended_gpu() as calls:
        out = masked_attention(q, q, q, HistoryMask(real, copies), 1.0, "sdpa")
    assert [call.shapes[0] for call in calls] == [(300, 256, 1, 8)]
    np.testing.assert_allclose(out.numpy(), q.numpy(), atol=1e-6)


def test_a_row_without_a_key_stays_finite_inside_the_kernel():
    """The kernel multiplies a mask by the root of the head width. The lowest number, as the
    originals have it, would overflow."""
    q = drawn(1, 2, 1, 16)
    mask = AttentionMask(paddle.to_tensor([[[True, False], [False, False]]]))
    with pretended_gpu():
        out = masked_attention(q, q, q, mask, 0.25, "sdpa")
        assert out[:, 1].abs().sum() == 0
        with pytest.raises(ContractError, match="overflows"):
            flash_attn(q, mask=paddle.full([1, 1, 2, 2], -2.3819763e38))


@pytest.mark.parametrize("change", [{"stand_in": None}, {"width": 12}, {"width": 264}])
def test_without_a_flash_kernel_the_plain_implementation_runs(change):
    """Queries of float32, and head widths that no kernel has: Paddle chooses as it would."""
    width = change.get("width", 8)
    q = drawn(1, 8, 2, width)
    with pretended_gpu(stand_in=change.get("stand_in", "float32")) as calls:
        causal_attention(q, q, q, packed=PackedSamples(segment_offsets([[3, 5]], 8), 8))
    assert calls
    assert not {call.name for call in calls} & set(FLASH)


def test_without_flash_attention_in_paddle_a_causal_call_stays_causal():
    """Paddle's `flash_attention` would call a kernel without its causal mask."""
    q = drawn(1, 8, 2, 8)
    wanted = causal_attention(q, q, q)
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with pretended_gpu() as calls, sdpa_kernel(backends):
        found = causal_attention(q, q, q)
    assert [call.name for call in calls] == ["memory_efficient_attention"]
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-6)


def flash_attn(q, k=None, mask=None, causal=False):
    k = q if k is None else k
    _C_ops.flash_attn(q, k, k, None, mask, 0.0, causal, False, False, "")


def varlen(q, offsets, longest):
    offsets = paddle.to_tensor(offsets) if isinstance(offsets, np.ndarray) else offsets
    _C_ops.flash_attn_unpadded(
        q, q, q, offsets, offsets, None, None, longest, longest, 0.3, 0.0, False, False, False, ""
    )


def row_mask(q, rows, causal, k=None):
    rows, k = paddle.to_tensor(rows), q if k is None else k
    _C_ops.flashmask_attention(q, k, k, rows, None, 0.0, causal, False, False, "")


Q, ROWS = drawn(2, 4, 2, 8), drawn(4, 2, 8)
BREACHES = {
    "dim 0 is not broadcast": lambda: flash_attn(Q, mask=paddle.zeros([1, 1, 4, 4])),
    "for 2 heads": lambda: flash_attn(Q, mask=paddle.zeros([2, 3, 4, 4])),
    "for 4 keys": lambda: flash_attn(Q, mask=paddle.zeros([2, 1, 4, 3])),
    "mask paddle.float64": lambda: flash_attn(Q, mask=paddle.zeros([2, 1, 4, 4], "float64")),
    "ignores its mask": lambda: flash_attn(Q, mask=paddle.zeros([2, 1, 4, 4]), causal=True),
    "3 queries and 4 keys": lambda: flash_attn(Q[:, :3], Q, causal=True),
    "no kernel for paddle.float64": lambda: flash_attn(Q.astype("float64")),
    "no multiple of 8": lambda: flash_attn(Q[..., :4]),
    "264 above 256": lambda: flash_attn(drawn(1, 1, 1, 264)),
    "2 query heads and 3 key heads": lambda: flash_attn(Q, drawn(2, 4, 3, 8)),
    "int32 is read": lambda: varlen(ROWS, np.array([0, 4]), 4),
    "ends at 3 of 4 rows": lambda: varlen(ROWS, np.array([0, 3], np.int32), 4),
    "longest is 2": lambda: varlen(ROWS, np.array([0, 4], np.int32), 2),
    "is a Tensor": lambda: varlen(ROWS, np.array([0, 4], np.int32), paddle.to_tensor(4)),
    "row indices are paddle.int64": lambda: row_mask(Q, np.ones([2, 1, 4, 1]).astype(int), True),
    "1 bounds, causal is False": lambda: row_mask(Q, np.ones([2, 1, 4, 1], np.int32), False),
    "for batch 2": lambda: row_mask(Q, np.ones([1, 1, 4, 1], np.int32), True),
    "for 3 keys": lambda: row_mask(Q, np.ones([2, 1, 4, 1], np.int32), True, Q[:, :3]),
    "for 4 queries": lambda: row_mask(Q, np.ones([2, 1, 6, 1], np.int32), True, drawn(2, 6, 2, 8)),
    "beyond the rows": lambda: row_mask(Q, np.full([2, 1, 4, 1], 9, np.int32), True),
    "two readings": lambda: row_mask(Q, np.full([2, 1, 4, 2], 2, np.int32), False),
}


@pytest.mark.parametrize("message", BREACHES)
def test_a_stub_notices_a_breach_of_its_contract(message):
    with pretended_gpu(), pytest.raises(ContractError, match=message):
        BREACHES[message]()
