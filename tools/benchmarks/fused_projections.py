"""Time of a decoder with fused QKV and gate-up projections, against separate projections.

    python tools/benchmarks/fused_projections.py --width 512 --layers 8

Both decoders run in turn in one process. The ratio is separate over fused, of the shortest times of
forward and backward, and of a decoding step; above 1 fused is faster.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import paddle

from harness import Table, parser, show
from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.families.qwen3_vl.decoder import KeyValueCache
from paddle_vl.nn.linear import fused_columns


def make_model(options: argparse.Namespace, is_fused: bool) -> Qwen3VLForConditionalGeneration:
    width = options.width
    text = {
        "vocab_size": 1024, "hidden_size": width, "intermediate_size": 3 * width,
        "num_hidden_layers": options.layers, "num_attention_heads": width // 64,
        "num_key_value_heads": max(1, width // 256), "head_dim": 64,
        "rope_scaling": {"mrope_section": [12, 10, 10]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": width, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    paddle.seed(1)
    model = Qwen3VLForConditionalGeneration.from_config(
        Qwen3VLConfig.from_dict(config | {name: 1000 + i for i, name in enumerate(ids)})
    )
    if not is_fused:
        model.separate(weight for weight in model.parameters() if fused_columns(weight))
    return model


def training(model: Qwen3VLForConditionalGeneration, ids_BL: np.ndarray) -> Callable[[], float]:
    def run() -> float:
        loss = model(input_ids=ids_BL, labels=ids_BL).loss
        loss.backward()
        model.clear_gradients()
        return loss.item()

    return run


def decoding(model: Qwen3VLForConditionalGeneration, ids_BL: np.ndarray) -> Callable[[], float]:
    caches = [KeyValueCache() for _ in model.decoder_layers]

    @paddle.no_grad()
    def run() -> float:
        length = caches[0].length
        positions = np.full([3, len(ids_BL), 1], length)
        out = model(input_ids=ids_BL[:, :1], position_ids=positions, caches=caches)
        return out.logits.sum().item()

    return run


def shortest(runs: list[Callable[[], float]], repeats: int) -> list[float]:
    """Shortest seconds of each, run in turn."""
    best = [float("inf")] * len(runs)
    for turn in range(repeats + 1):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            run()
            # The first round warms up.
            if turn:
                best[number] = min(best[number], time.perf_counter() - start)
    return best


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--width", type=int, default=512, help="a multiple of 64 (default: 512)")
    made.add_argument("--layers", type=int, default=8, help="(default: 8)")
    made.add_argument("--batch", type=int, default=2, help="(default: 2)")
    made.add_argument("--length", type=int, default=256, help="(default: 256)")
    made.add_argument("--repeats", type=int, default=8, help="(default: 8)")
    options = made.parse_args()
    models = [make_model(options, is_fused) for is_fused in (True, False)]
    ids_BL = np.random.default_rng(0).integers(0, 900, (options.batch, options.length))
    rows, found = [], {}
    for name, make in (("training", training), ("decoding", decoding)):
        repeats = options.repeats * (1 if make is training else 4)
        fused, separate = shortest([make(model, ids_BL) for model in models], repeats)
        found[name] = {"fused": fused, "separate": separate}
        numbers = [f"{fused * 1e3:.1f}", f"{separate * 1e3:.1f}", f"{separate / fused:.3f}"]
        rows.append([name, *numbers])
    columns = ["step", "fused ms", "separate ms", "ratio"]
    show(options, [Table("fused_projections", columns, rows)], found)


if __name__ == "__main__":
    main()
