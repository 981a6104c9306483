"""Launches and host reads of Qwen4-Exp's operations on a GPU are those of docs/gpu.md."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import paddle.incubate.nn.functional as incubate

from paddle_vl.nn.attention import RotaryTables
from paddle_vl.nn.block_attention import block_keys, chosen_attention, chosen_blocks
from paddle_vl.nn.block_samples import BlockSizes, packed_block_samples
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.ngram_embedding import dilated_conv_silu, ngram_gates, ngram_hash, ngram_rows
from paddle_vl.nn.residual_streams import read_streams, write_streams
from paddle_vl.testing import record_host_reads
from tests.support.operators import launches

T, D, S, R, H = 120, 8, 4, 2, 16
C = S * D
_VIEWS = {"reshape", "transpose", "unsqueeze", "squeeze", "flatten"}
_VIEWS |= {f"{name}_grad" for name in _VIEWS}
_VIEWS |= {"slice", "split", "split_with_num", "expand", "full", "full_like"}


def half(*shape: int, trains: bool = True):
    """float64 stands for bfloat16, in which Paddle's CPU wheel cannot compute."""
    return paddle.to_tensor(np.random.default_rng(0).random(shape), stop_gradient=not trains)


def one_launch(x, scale, epsilon):
    """In place of Paddle's fused norm, which the page counts as one kernel."""
    return x.astype(scale.dtype), None


def of_parts(parts: int, heads: int) -> dict:
    """Choice and attention of so many samples that choose."""
    samples = packed_block_samples(tuple(range(0, T + 1, T // parts)), BlockSizes(2, 4))
    q = half(T, 4, H)
    k, v = half(T, 2, H), half(T, 2, H)
    index = half(T, heads, H, trains=False), half(T // 2, H, trains=False)
    chosen = chosen_blocks(*index, samples)
    return {
        "`chosen_blocks`": partial(chosen_blocks, *index, samples),
        "`chosen_attention`": partial(chosen_attention, q, k, v, chosen, samples),
    }


def cases() -> dict:
    rows, hashed = half(T, C), ngram_hash(0, 3, 8, 99, 20, 1)
    ids, places = paddle.arange(T).unsqueeze(0), paddle.arange(T)
    reader = rows, half(C), half(C, R), half(R, C), half(C, S)
    before = half(1, 9, C, trains=False)
    convolved = half(1, T, C), half(C, 4), 3, before
    halves = (half(T // 4, H // 2, trains=False) for _ in range(2))
    keys = half(T // 4, 4, H, trains=False), half(H, trains=False), 1e-6, RotaryTables(*halves)
    found = {
        "`read_streams`": partial(read_streams, *reader, S, 1e-6),
        "`write_streams`": partial(write_streams, rows, half(T, D), half(T, S)),
        "`ngram_rows`": partial(ngram_rows, ids, hashed, 5),
        "`ngram_rows`, packed": partial(ngram_rows, ids, hashed, 5, None, places),
        "`ngram_gates`": partial(ngram_gates, rows, half(T, C), half(C), half(C), S, 1e-6),
        "`dilated_conv_silu`": partial(dilated_conv_silu, *convolved),
        "`dilated_conv_silu`, packed": partial(dilated_conv_silu, *convolved, places.unsqueeze(0)),
        "`block_keys`": partial(block_keys, *keys),
    }
    return found | {
        (name, parts, heads): call
        for parts in (1, 2, 3)
        for heads in (2, 4)
        for name, call in of_parts(parts, heads).items()
    }


def counted(do) -> int:
    return sum(number for name, number in launches(do).items() if name not in _VIEWS)


def of_page(text: str, parts: int, heads: int) -> int:
    units = {"": 1, "P": parts, "I P": heads * parts}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+) ?([IP ]*P)?", text))


def test_launches_are_those_of_the_page(monkeypatch):
    """Without views. P is the number of parts, I that of index heads."""
    monkeypatch.setattr(incubate, "fused_rms_norm_ext", one_launch)
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
    told = {name: counts for name, *counts in re.findall(r"\| (`.+) \| (.+) \|(.*)\|\n", page)}
    found, wanted = {}, {}
    with use_kernels("gpu"), record_host_reads() as reads:
        for case, call in cases().items():
            made: list = []
            call()
            found[case] = [counted(lambda made=made, call=call: made.append(call()))]
            outs = [*made[0]] if isinstance(made[0], tuple) else made
            if not outs[0].stop_gradient:
                upstream = [x.detach() for x in outs]
                found[case].append(counted(partial(paddle.autograd.backward, outs, upstream)))
            name, *sizes = (case, 1, 1) if isinstance(case, str) else case
            wanted[case] = [of_page(text, *sizes) for text in told[name] if text.strip()]
    assert found == wanted
    assert reads == []
