"""Time one training step (forward, backward, optimizer) of a mid-size pi07 on this machine.

    python tools/bench_pi07_step.py
    python tools/bench_pi07_step.py --set attn=eager --set T=3

The model is `configs/bench/pi07_step.json`, which also holds what the original takes on torch.
Float32, two threads, dropout active, three warm-up and fifteen timed steps, medians. Beside the
times it prints the speed of a plain matrix product in the same run, to tell a slow moment of the
machine from slow code.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import paddle

from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.policy_model import as_tensors
from paddle_vl.families.pi07.prefix_layout import presence_of

THREADS, WARM_UP = 2, 3
CONFIG = Path(__file__).parents[1] / "configs" / "bench" / "pi07_step.json"
LABEL_IDS = {
    "State: ": [101, 57, 58], ", ": [59, 58], ":\n": [57, 60], ";\n ": [61, 60, 58],
    "Subgoal: ": [102, 103, 57, 58], "Action: ": [104, 57, 58],
}  # fmt: skip


def build_config(c: dict) -> PI07Config:
    """The configuration that the short names of the file stand for."""
    text = {
        "hidden_size": c["hidden"],
        "intermediate_size": c["inter"],
        "num_hidden_layers": c["layers"],
        "num_attention_heads": c["heads"],
        "num_key_value_heads": c["kv_heads"],
        "head_dim": c["head_dim"],
        "query_pre_attn_scalar": c["head_dim"],
        "vocab_size": c["vocab"],
    }
    vision = {
        "hidden_size": c["siglip_hidden"],
        "intermediate_size": c["siglip_inter"],
        "num_attention_heads": c["siglip_heads"],
        "num_hidden_layers": c["siglip_layers"],
        "patch_size": c["patch"],
        "image_size": c["image"],
    }
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    expert = {name: text[name] for name in sizes} | {
        "hidden_size": c["expert_hidden"],
        "intermediate_size": c["expert_inter"],
        "adarms_cond_dim": c["expert_hidden"],
    }
    backbone = {
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": c["mm_tokens"],
    }
    return PI07Config.from_dict(
        {
            "vlm_config": {
                "gemma3_config": backbone,
                "gemma_expert_config": expert,
                "discrete_action_vocab_size": c["da_vocab"],
            },
            "n_obs_steps": c["T"],
            "chunk_size": c["chunk"],
            "n_action_steps": c["chunk"],
            "max_state_dim": c["state_dim"],
            "max_action_dim": c["action_dim"],
            "prompt_max_length": c["prompt"],
            "response_max_length": c["resp"],
            "metadata_max_length": c["meta"],
            "discrete_action_max_length": c["da_len"],
            "proj_width": c["expert_hidden"],
            "spacetime_layer_stride": c["stride"],
            "resize_imgs_with_padding": [c["image"], c["image"]],
            "knowledge_insulation": c["ki"],
            "dropout": c["dropout"],
            "attention_implementation": c["attn"],
            "freeze_vision_encoder": c["freeze_vision"],
        }
    )


def build_batch(c: dict, seed: int = 0) -> dict:
    """A batch as the policy prepares it, every optional part in every sample."""
    rng = np.random.default_rng(seed)
    size, real = c["batch"], not c["dropped"]

    def tokens(length: int, vocab: int) -> np.ndarray:
        return rng.integers(1, vocab, (size, length))

    def masks(length: int, value: bool = True) -> np.ndarray:
        return np.full((size, length), value)

    def pictures(*frames: int) -> np.ndarray:
        return rng.random((size, *frames, 3, c["image"], c["image"]), dtype=np.float32)

    cameras = range(c["cams"])
    return {
        "videos": [pictures(c["T"]) for _ in cameras],
        "vid_masks": [np.ones(size, dtype=bool) for _ in cameras],
        "subgoal_images": [pictures() * 2 - 1 for _ in cameras],
        "subgoal_img_masks": [np.full(size, real) for _ in cameras],
        "lang_tokens": tokens(c["prompt"], c["vocab"]),
        "lang_masks": masks(c["prompt"]),
        "response_tokens": tokens(c["resp"], c["vocab"]),
        "response_masks": masks(c["resp"], real),
        "metadata_tokens": tokens(c["meta"], c["vocab"]),
        "metadata_masks": masks(c["meta"], real),
        "state": rng.standard_normal((size, c["T"], c["state_dim"]), dtype=np.float32),
        "obs_history_is_pad": masks(c["T"], False),
        "actions": rng.standard_normal((size, c["chunk"], c["action_dim"]), dtype=np.float32),
        "discrete_actions": tokens(c["da_len"], c["da_vocab"]),
        "discrete_action_masks": masks(c["da_len"]),
    }


def matmul_gflops() -> float:
    """Speed of a [1024, 1024] x [1024, 256] product, the size of the model's own."""
    a, b = paddle.randn([1024, 1024]), paddle.randn([1024, 256])
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        paddle.matmul(a, b)
        times.append(time.perf_counter() - begin)
    return 2 * 1024 * 1024 * 256 / statistics.median(times) / 1e9


def measure(c: dict, steps: int) -> dict[str, float]:
    """Medians in seconds, losses, and peak memory of this process in MiB."""
    paddle.seed(0)
    model = PI07LowLevelFlowMatching(build_config(c), LABEL_IDS)
    # Fresh weights make image tokens zero, and with them the tower's gradient.
    paddle.assign(
        paddle.randn(model.prefix.video_encoder.projector.mm_input_projection_weight.shape) * 0.02,
        model.prefix.video_encoder.projector.mm_input_projection_weight,
    )
    model.train()
    optimizer = paddle.optimizer.AdamW(learning_rate=2.5e-5, parameters=model.parameters())
    batch = build_batch(c)
    presence, batch = presence_of(batch), as_tensors(batch)
    times, losses = [], []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        found = model(batch, presence)
        loss = found["MSE"] + found["CE"]
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        end = time.perf_counter()
        times.append((forward - begin, backward - forward, end - backward, end - begin))
        losses.append(loss.item())
    names = ("forward", "backward", "optimizer", "step")
    columns = zip(*times[WARM_UP:], strict=True)
    return {
        name: statistics.median(column) for name, column in zip(names, columns, strict=True)
    } | {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "parameters": sum(p.size for p in model.parameters()),
        "gflops": matmul_gflops(),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="model and batch")
    parser.add_argument("--steps", type=int, default=15, help="timed steps (default 15)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    settings = json.loads(args.config.read_text(encoding="utf-8"))["config"]
    for change in args.set:
        name, _, value = change.partition("=")
        if name not in settings:
            parser.error(f"no setting {name!r}; there are {', '.join(settings)}")
        settings[name] = value if isinstance(settings[name], str) else json.loads(value)
    configure_cpu_runtime(THREADS)
    found = measure(settings, args.steps)
    if args.json:
        print(json.dumps(found))
        return
    print(f"loss          {found['first_loss']:.5f} -> {found['last_loss']:.5f}")
    print(f"step          {found['step']:.3f} s")
    for part in ("forward", "backward", "optimizer"):
        print(f"  {part:<11} {found[part]:.3f} s")
    print(f"parameters    {found['parameters']}")
    print(f"matmul        {found['gflops']:.0f} GFLOP/s in this run")
    print(f"peak RSS      {found['peak_rss_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
