"""Tests of parallel models on one card, see docs/testing.md."""

from paddle_vl.parallel.recorder import Collective, record_collectives
from paddle_vl.parallel.simulated.exchanges import RanksDisagreeError
from paddle_vl.parallel.simulated.ranks import (
    OneRank,
    Ranks,
    full_logits,
    one_rank,
    run_ranks,
    sum_partial_gradients,
)
from paddle_vl.testing.bfloat16 import emulated_bfloat16
from paddle_vl.testing.comparison import assert_equals_single_device, first_difference
from paddle_vl.testing.host_reads import (
    forbid_host_reads,
    record_device_copies,
    record_host_reads,
)
from paddle_vl.testing.mocked_rows import MockedSequenceParallel
from paddle_vl.testing.paddleocr_vl import tiny_paddleocr_vl, tiny_paddleocr_vl_config
from paddle_vl.testing.pi07 import (
    tiny_pi07,
    tiny_pi07_batch,
    tiny_pi07_config,
)
from paddle_vl.testing.qwen3_5 import EXPERTS_3_5, tiny_qwen3_5, tiny_qwen3_5_config
from paddle_vl.testing.qwen3_vl import (
    Image,
    Video,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
    tiny_qwen3_vl_config,
)
from paddle_vl.testing.qwen4_exp import tiny_qwen4_exp, tiny_qwen4_exp_config
from paddle_vl.testing.tensors import copy_parameters, gather_gradients, gather_parameters

__all__ = [
    "EXPERTS_3_5",
    "Collective",
    "Image",
    "MockedSequenceParallel",
    "OneRank",
    "Ranks",
    "RanksDisagreeError",
    "Video",
    "assert_equals_single_device",
    "copy_parameters",
    "emulated_bfloat16",
    "first_difference",
    "forbid_host_reads",
    "full_logits",
    "gather_gradients",
    "gather_parameters",
    "one_rank",
    "record_collectives",
    "record_device_copies",
    "record_host_reads",
    "run_ranks",
    "sum_partial_gradients",
    "tiny_paddleocr_vl",
    "tiny_paddleocr_vl_config",
    "tiny_pi07",
    "tiny_pi07_batch",
    "tiny_pi07_config",
    "tiny_qwen3_5",
    "tiny_qwen3_5_config",
    "tiny_qwen3_vl",
    "tiny_qwen3_vl_batch",
    "tiny_qwen3_vl_config",
    "tiny_qwen4_exp",
    "tiny_qwen4_exp_config",
]
