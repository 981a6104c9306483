"""Kernels and kept bytes of one layer of each kind on a GPU, plain and fused, counted on a CPU.

    python tools/benchmarks/kernel_counts.py --write-doc docs/gpu_kernels.md

A layer of published width runs forward and backward on a few tokens, with plain operators and with
the kernels for a GPU, whose stand-ins (tests/support/gpu_stubs) count as many launches as the
kernels start. Nothing is timed. A layer takes up to 2 GB of memory.
"""

import sys
from collections.abc import Callable
from typing import Any

from harness import ROOT, Table, parser, show

sys.path.insert(0, str(ROOT))
from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.qwen3_vl.sizes import size_values
from tests.support.gpu_stubs import layers

COLUMNS = ("layer", "kernels forward", "backward", "both", "kept bytes per token")
EXPERTS = 8


def cases() -> dict[str, Callable[[], layers.Case]]:
    def qwen(size: str) -> Qwen3VLConfig:
        return Qwen3VLConfig.from_dict(size_values(size))

    engine = Gemma3WithExpertConfig()
    text, vision = engine.gemma3_config.text_config, engine.gemma3_config.vision_config
    few = layers.few_experts(qwen("qwen3-vl-30b-a3b"), EXPERTS)
    return {
        "Qwen3-VL 2B, decoder layer": lambda: layers.qwen3_vl_decoder(qwen("qwen3-vl-2b"), 16),
        "Qwen3-VL 30B-A3B, decoder layer": lambda: layers.qwen3_vl_decoder(few, 64),
        "Qwen3-VL 2B, tower block": lambda: layers.qwen3_vl_tower(qwen("qwen3-vl-2b"), 16),
        "pi07, backbone layer": lambda: layers.pi07_backbone(text, 16),
        "pi07, expert layer": lambda: layers.pi07_expert(text, engine.gemma_expert_config, 16, 16),
        "pi07, tower layer": lambda: layers.pi07_tower(vision),
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    rows, found = [], {}
    for name, make in cases().items():
        case = make()
        sides: dict[str, Any] = {}
        for side, counts in (("plain", case.counted("plain")), ("fused", case.counted("gpu"))):
            forward, backward = counts.launches
            sides[side] = {
                "forward": forward, "backward": backward, "both": forward + backward,
                "kept": round(case.saved_per_token(counts)),
                "forward_kernels": dict(counts.forward),
                "backward_kernels": dict(counts.backward),
            }  # fmt: skip
        found[name] = sides
        numbers = ("forward", "backward", "both", "kept")
        rows.append([name, *(f"{sides['plain'][n]} -> {sides['fused'][n]}" for n in numbers)])
    note = (
        "Plain operators -> fused kernels, bfloat16, one micro-batch, no recomputation. A flash "
        "attention kernel counts as one launch, and its gradient as one."
    )
    show(options, [Table("kernel_counts", COLUMNS, rows, note)], found)


if __name__ == "__main__":
    main()
