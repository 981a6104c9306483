"""The table of kernels: for each operation its faster implementations, in order of preference.

A call of an operation takes the first kernel of its tensors' device that may be used now and fits
the arguments; see `paddle_vl.nn.dispatch`. Where none does, the plain implementation runs: on
other devices, for other dtypes, and with `train.kernels=plain`. Importing this module fills in the
table. Modules of operations that few models have (`residual_streams`, `block_attention`) set the
kernels of these themselves, so that others do without the modules.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from paddle_vl.nn import attention, delta_rule, experts, gpu, linear, operations
from paddle_vl.nn import chunked_delta_rule as chunked
from paddle_vl.nn.cpu import attention as blocks
from paddle_vl.nn.cpu import compiled as c
from paddle_vl.nn.cpu import kernels as cpu
from paddle_vl.nn.dispatch import OPERATIONS, Kernel, Operation, chosen_kernels, on_both


def _of_answers(run: Callable[..., Any], fits: Callable[..., bool]) -> Kernel:
    return Kernel("cpu", "C", run, fits, is_for_answers=True)


TABLE: dict[Operation, list[Kernel]] = {
    # Attention
    attention.causal_attention: [
        Kernel("cpu", "C", c.causal_attention, c.fits_causal),
        Kernel("cpu", "oneDNN", blocks.causal_attention),
        Kernel("gpu", "Paddle", gpu.causal_attention, gpu.fits_causal),
    ],
    attention.equal_segments_attention: [
        Kernel("cpu", "C", c.equal_segments_attention, c.fits_segments),
        Kernel("cpu", "oneDNN", blocks.equal_segments_attention),
        Kernel("gpu", "Paddle", gpu.equal_segments_attention, gpu.fits_flash),
    ],
    attention.runs_attention: [Kernel("gpu", "Paddle", gpu.runs_attention, gpu.fits_runs)],
    attention.masked_attention: [
        Kernel("cpu", "C", c.masked_attention, c.fits_masked),
        Kernel("cpu", "oneDNN", blocks.masked_attention),
        Kernel("gpu", "Paddle", gpu.masked_attention, gpu.fits_flash),
    ],
    attention.cached_attention: [
        Kernel("cpu", "Paddle", cpu.cached_attention, cpu.is_one_query),
        Kernel("gpu", "Paddle", gpu.cached_attention, gpu.fits_cached),
    ],
    attention.appended_attention: [
        Kernel("cpu", "C", c.appended_attention, c.fits_appended),
    ],
    attention.paged_attention: [
        Kernel("cpu", "C", c.paged_attention, c.fits_paged),
        Kernel("gpu", "Paddle", gpu.paged_attention, gpu.fits_flash),
    ],
    attention.normed_rotary: [Kernel("cpu", "C", c.normed_rotary, c.fits_normed_rotary)],
    attention.apply_rotary: [
        Kernel("cpu", "C", c.apply_rotary, c.fits_rotary),
        Kernel("cpu", "Paddle", cpu.apply_rotary),
        Kernel("gpu", "Paddle", gpu.apply_rotary),
    ],
    # Norms; on CPUs not Paddle's, which is compiled for AVX-512 and ends a process elsewhere
    operations.rms_norm: [
        Kernel("cpu", "C", c.rms_norm, cpu.is_dense),
        Kernel("cpu", "Paddle", cpu.rms_norm, cpu.is_float32),
        Kernel("gpu", "Paddle", gpu.rms_norm, gpu.is_of_one_dtype),
    ],
    operations.add_rms_norm: [Kernel("gpu", "Paddle", gpu.add_rms_norm, gpu.is_of_one_dtype)],
    operations.gemma_rms_norm: [
        Kernel("cpu", "C", c.gemma_rms_norm, cpu.is_dense),
        Kernel("cpu", "Paddle", cpu.gemma_rms_norm, cpu.is_float32),
        Kernel("gpu", "Paddle", gpu.gemma_rms_norm, gpu.has_rows),
    ],
    operations.rms_quotient: [
        Kernel("cpu", "C", c.rms_quotient, cpu.is_dense),
        Kernel("cpu", "Paddle", cpu.rms_quotient, cpu.is_float32),
        Kernel("gpu", "Paddle", gpu.rms_quotient, gpu.has_rows),
    ],
    operations.layer_norm: [
        Kernel("cpu", "C", c.layer_norm, cpu.is_dense),
        Kernel("cpu", "oneDNN", cpu.layer_norm, cpu.takes),
        Kernel("gpu", "Paddle", gpu.layer_norm, gpu.takes_layer_norm),
    ],
    # Activations, sums, linears
    operations.gelu: [
        Kernel("cpu", "C", c.gelu, c.is_tanh_gelu),
        Kernel("cpu", "oneDNN", cpu.gelu, cpu.takes),
    ],
    operations.swiglu: [
        Kernel("cpu", "C", c.swiglu, c.fits_gate),
        Kernel("cpu", "oneDNN", cpu.swiglu, cpu.takes_gate),
    ],
    operations.geglu: [
        Kernel("cpu", "C", c.geglu, c.fits_gate),
        Kernel("cpu", "oneDNN", cpu.geglu, cpu.takes_gate),
        Kernel("gpu", "Paddle", gpu.geglu),
    ],
    operations.dropout: [
        Kernel("cpu", "C", c.dropout, cpu.drops_dense),
        Kernel("cpu", "oneDNN", cpu.dropout, cpu.drops),
    ],
    operations.row_sum: [Kernel("cpu", "Paddle", cpu.sum_of_rows)],
    operations.column_sum: [Kernel("cpu", "Paddle", cpu.sum_of_columns)],
    operations.times_constant: on_both(operations.TimesConstant),
    linear.biased_linear: [Kernel("cpu", "Paddle", cpu.BiasedLinear.apply)],
    # Parts of a decoder layer
    attention.self_attention: [_of_answers(c.self_attention, c.fits_attention)],
    delta_rule.gated_delta_net: [_of_answers(c.gated_delta_net, c.fits_delta_net)],
    operations.swiglu_mlp: [_of_answers(c.swiglu_mlp, c.fits_mlp)],
    experts.routed_experts: [
        _of_answers(c.routed_experts, c.fits_experts),
        Kernel("cpu", "Paddle", cpu.experts_of_few, cpu.fits_few, is_for_answers=True),
    ],
    # DeltaNet
    delta_rule.gated_delta_rule: [
        Kernel("cpu", "C", c.gated_delta_rule, c.fits_rule),
        Kernel("cpu", "Paddle", chunked.gated_delta_rule, chunked.fits_rule),
        Kernel("gpu", "Paddle", chunked.gated_delta_rule, chunked.fits_rule),
    ],
    delta_rule.causal_conv_silu: [
        Kernel("cpu", "C", c.causal_conv_silu, c.fits_convolution),
        Kernel("cpu", "Paddle", chunked.causal_conv_silu, chunked.fits_convolution),
        Kernel("gpu", "Paddle", chunked.causal_conv_silu, chunked.fits_convolution),
    ],
    delta_rule.gated_rms_norm: [Kernel("cpu", "C", c.gated_rms_norm, c.fits_gated_norm)],
    # Experts
    experts.permuted_copies: on_both(experts.PermuteRows),
    experts.grouped_linear: [
        Kernel("cpu", "Paddle", cpu.grouped_linear),
        Kernel("gpu", "Paddle", gpu.grouped_linear),
    ],
}

for _operation, _kernels in TABLE.items():
    _operation.kernels = _kernels


def description(device: str) -> str:
    """What a run takes on a device, in one line: the choice, and the first kernels of the table
    that may be used."""
    firsts = Counter[str]()
    for operation in OPERATIONS if chosen_kernels() != "plain" else ():
        firsts.update(kernel.source for kernel in operation.kernels_on(device)[:1])
    rest = len(OPERATIONS) - firsts.total()
    counts = [f"{count} {source}" for source, count in firsts.most_common()]
    return f"kernels ({chosen_kernels()}, {device}): {', '.join([*counts, f'{rest} plain'])}"
