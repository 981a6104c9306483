"""Training in bfloat16 with float32 master weights follows float32; without them it falls behind.

Bfloat16 is emulated on the CPU: see `paddle_vl.testing.bfloat16`.
"""

import paddle

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.testing import emulated_bfloat16
from paddle_vl.train.optimizer import Optimizer
from tests.single_card_tests.train.batches import image_batch
from tests.support.tiny import tiny_config, tiny_model

HOST = ("image_grid_thw", "num_target_tokens", "has_left_padding")
# Updates smaller than half of the last bit of most weights.
RATE, STEPS = 5e-5, 12


def losses_of(dtype: str, masters: bool = True) -> list[float]:
    """Loss of every step on one batch."""
    batch = image_batch([[1, 2, 3, 4], [5, 6, 7]], [2, 1])
    inputs = {k: v if k in HOST else paddle.to_tensor(v) for k, v in batch.items()}
    with emulated_bfloat16():
        with default_dtype(dtype):
            model = Qwen3VLForConditionalGeneration(tiny_config())
        with paddle.no_grad():
            for own, value in zip(model.parameters(), tiny_model().parameters(), strict=True):
                paddle.assign(value.astype(dtype), own)
        store = MasterWeights(model.parameters())
        train = TrainConfig(output_dir="unused", learning_rate=RATE)
        named = list(model.named_parameters())
        optimizer = Optimizer(named, train, set(), store)
        losses = []
        for _ in range(STEPS):
            store.begin_step(1)
            loss = model(**inputs).loss
            loss.backward()
            store.end_micro_batch()
            store.end_backward()
            optimizer.step(RATE)
            optimizer.clear_gradients()
            store.all_gather_parameters()
            if not masters:
                with paddle.no_grad():
                    for _, parameter in named:
                        paddle.assign(parameter.astype("float32"), store.shard_of(parameter))
            losses.append(loss.item())
    return losses


def test_master_weights_keep_what_rounding_would_lose():
    wide, narrow = losses_of("float32"), losses_of("bfloat16")
    lossy = losses_of("bfloat16", masters=False)
    learnt, kept, rest = (losses[0] - losses[-1] for losses in (wide, narrow, lossy))
    assert abs(kept - learnt) < 0.1 * learnt
    assert rest < 0.2 * learnt
