"""Step time and MFU that the counts of this package imply on GPUs, beside published figures.

    python tools/benchmarks/gpu_estimate.py --write-doc docs/gpu.md

Nothing is run on a GPU. A step of one micro-batch on one of eight GPUs is

- matrix products and attention: FLOPs (`paddle_vl.families.*.flops`) at a rate below the peak;
- kernels that move memory: launches of a layer, counted by `kernel_counts.py`, each reading and
  writing its rows once (`TRAFFIC`), at a share of the bandwidth;
- the update: 30 bytes per trained parameter, divided over the ranks by sharding;
- collectives: of sharding stage 1 or 2 gradients in float32 and parameters in bfloat16; of expert
  parallelism the rows, there and back; nothing of it overlapped;
- the host: it launches every kernel, and a step cannot take less than that.

The fields of `Device` are assumptions. Each can be replaced by what `paddle-vl doctor` measures.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness import Table, parser, show
from kernel_counts import cases
from paddle_vl.families.flops import Operations
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.flops import PI07Flops
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.qwen3_vl.flops import Qwen3VLFlops
from paddle_vl.families.qwen3_vl.sizes import size_values

NUM_GPUS = 8


@dataclass(frozen=True)
class Device:
    """Assumed rates.

    Attributes:
        peak: dense bfloat16 FLOP/s, the denominator of MFU.
        products, attention: FLOP/s reached.
        memory: bytes per second reached by kernels that move rows.
        links: bytes per second of a ring over eight GPUs.
        host: seconds of the host per launch.
    """

    name: str
    peak: float
    products: float
    attention: float
    memory: float
    links: float
    host: float = 8e-6


H100 = Device("H100 SXM", 989.5e12, 0.65 * 989.5e12, 450e12, 0.8 * 3.35e12, 0.8 * 450e9)
A100 = Device("A100 SXM", 312e12, 0.75 * 312e12, 180e12, 0.8 * 2.0e12, 0.8 * 300e9)

# Bytes that a launch moves per row in bfloat16, in units of one of the layer's widths: D hidden, Q
# all heads of queries, keys and values, F the MLP. Several launches of one gradient share its rows.
TRAFFIC: dict[str, tuple[float, str]] = {
    "rms_norm": (4, "D"), "rms_norm_grad": (3, "D"), "fused_rms_norm": (8, "D"),
    "fused_rms_norm_ext": (4, "D"), "fused_rms_norm_ext_grad": (2, "D"),
    "layer_norm": (4, "D"), "layer_norm_grad": (2, "D"),
    "add": (6, "D"), "add_grad": (2, "D"), "cast": (6, "D"), "scale": (4, "D"),
    "split": (4, "Q"), "split_with_num": (4, "Q"), "concat": (4, "Q"), "concat_grad": (4, "Q"),
    "fused_rotary_position_embedding": (2, "Q"), "fused_rotary_position_embedding_grad": (2, "Q"),
    "swiglu": (6, "F"), "swiglu_grad": (10, "F"), "gelu": (4, "F"), "gelu_grad": (6, "F"),
    "multiply": (6, "F"), "multiply_grad": (10, "F"), "index_select": (4, "D"),
}  # fmt: skip


@dataclass(frozen=True)
class Layers:
    """Layers of one kind: their number, rows, widths, and launches of one, forward and backward."""

    number: int
    rows: int
    widths: Mapping[str, int]
    forward: Counter
    backward: Counter

    def bytes_moved(self, passes: int) -> float:
        """Of all layers; `passes` forward passes and a backward pass."""
        launches = Counter({name: passes * n for name, n in self.forward.items()}) + self.backward
        row = sum(
            n * TRAFFIC[name][0] * self.widths[TRAFFIC[name][1]]
            for name, n in launches.items()
            if name in TRAFFIC
        )
        return self.number * self.rows * row

    def launches(self, passes: int) -> int:
        """Of all layers."""
        return self.number * (passes * self.forward.total() + self.backward.total())


@dataclass(frozen=True)
class Run:
    """A micro-batch on one of eight GPUs.

    Attributes:
        units: of a micro-batch, see the flop counters.
        attention_units: the units whose operations are attention.
        recompute: whether layers run forward twice.
        parameters: trained parameters.
        sent: bytes of a step's collectives.
        samples: what the throughput counts: tokens or samples of a micro-batch.
    """

    name: str
    operations: Operations
    units: Mapping[str, int]
    attention_units: tuple[str, ...]
    layers: tuple[Layers, ...]
    parameters: int
    sent: float
    samples: int
    recompute: bool = False

    def flops(self, attention: bool, passes: int = 1) -> float:
        sides = ((self.operations.forward, passes), (self.operations.backward, 1))
        return sum(
            times * cost * self.units[unit]
            for side, times in sides
            for unit, cost in side.items()
            if (unit in self.attention_units) == attention
        )

    def estimate(self, device: Device) -> dict[str, float]:
        """Seconds of each part of a step, its launches, and MFU."""
        passes = 1 + self.recompute
        launches = sum(layers.launches(passes) for layers in self.layers)
        moved = sum(layers.bytes_moved(passes) for layers in self.layers)
        parts = {
            "products": self.flops(False, passes) / device.products,
            "attention": self.flops(True, passes) / device.attention,
            "memory": moved / device.memory,
            "update": 30 * self.parameters / NUM_GPUS / device.memory,
            "collectives": self.sent / device.links,
        }
        step = max(sum(parts.values()), launches * device.host)
        useful = self.flops(False) + self.flops(True)
        return parts | {
            "step": step, "launches": launches, "host": launches * device.host,
            "bytes": moved, "flops": useful, "rate": self.samples / step,
            "mfu": useful / step / device.peak,
        }  # fmt: skip


def layers_of(name: str, number: int, rows: int, widths: Mapping[str, int]) -> Layers:
    """Layers with the launches that `kernel_counts.py` counts for this kind."""
    counts = cases()[name]().counted("gpu")
    return Layers(number, rows, widths, counts.forward, counts.backward)


def sharding_bytes(parameters: float) -> float:
    """Gradients reduce-scattered in float32, parameters all-gathered in bfloat16."""
    return (4 + 2) * parameters * (NUM_GPUS - 1) / NUM_GPUS


def num_parameters(config: Any, model_class: Any, *arguments: Any) -> int:
    import paddle

    with paddle.LazyGuard():
        return sum(parameter.size for parameter in model_class(config, *arguments).parameters())


def qwen3_vl(size: str, tokens: int, images: int, recompute: bool) -> Run:
    """A packed row: so many tokens, with images of 512 x 512 (256 tokens each) among them."""
    from paddle_vl import Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig.from_dict(size_values(size))
    text: Any = config.text_config
    vision = config.vision_config
    side = 512 // vision.patch_size
    counter = Qwen3VLFlops(config)
    batch = {
        "attention_mask": np.ones([1, tokens], np.int64),
        "image_grid_thw": np.array([[1, side, side]] * images),
    }
    heads, key_heads = text.num_attention_heads, text.num_key_value_heads
    decoder = {"D": text.hidden_size, "Q": (heads + 2 * key_heads) * text.head_dim}
    experts = getattr(text, "num_experts", 0)
    decoder["F"] = (
        text.moe_intermediate_size * text.num_experts_per_tok if experts else text.intermediate_size
    )
    tower = {"D": vision.hidden_size, "Q": 3 * vision.hidden_size, "F": vision.intermediate_size}
    kind = "30B-A3B" if experts else "2B"
    parameters = num_parameters(config, Qwen3VLForConditionalGeneration)
    sent = sharding_bytes(parameters)
    if experts:
        # Expert parallelism over all GPUs: rows go to their experts and back, in each pass.
        of_experts = 3 * text.hidden_size * text.moe_intermediate_size * experts
        sent = sharding_bytes(parameters - text.num_hidden_layers * of_experts)
        row = 2 * text.hidden_size * text.num_experts_per_tok * (NUM_GPUS - 1) / NUM_GPUS
        sent += text.num_hidden_layers * tokens * 2 * row * (2 + recompute)
    return Run(
        f"Qwen3-VL {size.removeprefix('qwen3-vl-').upper()}, {tokens} tokens",
        counter.operations(batch),
        counter.units(batch),
        ("token_pairs", "patch_pairs"),
        (
            layers_of(f"Qwen3-VL {kind}, decoder layer", text.num_hidden_layers, tokens, decoder),
            layers_of("Qwen3-VL 2B, tower block", vision.depth, images * side * side, tower),
        ),
        parameters,
        sent,
        tokens,
        recompute,
    )


def pi07(samples: int, cameras: int, recompute: bool) -> Run:
    """Every field present, six frames of history, fully unfrozen, as OpenTau's published cells."""
    from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
    from paddle_vl.families.pi07.prefix_layout import LABELS

    config = PI07Config.from_dict(
        {"freeze_vision_encoder": False, "vlm_config": {"discrete_action_vocab_size": 2048}}
    )
    frames, chunk, labels = config.n_obs_steps, config.chunk_size, {key: [1] for key in LABELS}
    lengths = {
        "lang": config.prompt_max_length, "response": config.response_max_length,
        "metadata": config.metadata_max_length,
    }  # fmt: skip
    batch: dict[str, Any] = {
        "vid_masks": [np.ones([samples], bool)] * cameras,
        "subgoal_img_masks": [np.zeros([samples], bool)] * cameras,
        "obs_history_is_pad": np.zeros([samples, frames], bool),
        "state": np.zeros([samples, frames, config.max_state_dim]),
        "actions": np.zeros([samples, chunk, config.max_action_dim]),
    }
    for name, length in lengths.items():
        batch[f"{name}_tokens"] = np.ones([samples, length], np.int64)
        batch[f"{name}_masks"] = np.ones([samples, length], bool)
    length = config.discrete_action_max_length
    batch["discrete_actions"] = np.ones([samples, length], np.int64)
    batch["discrete_action_masks"] = np.ones([samples, length], bool)
    counter = PI07Flops(config, labels)
    units, engine = counter.units(batch), config.vlm_config
    text, expert = engine.gemma3_config.text_config, engine.gemma_expert_config
    vision = engine.gemma3_config.vision_config
    heads = (text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim

    def widths(part: Any, attention: int) -> dict[str, int]:
        return {"D": part.hidden_size, "Q": attention, "F": part.intermediate_size}

    parameters = num_parameters(config, PI07LowLevelFlowMatching, labels)
    return Run(
        f"pi07, {samples} samples of {cameras} camera(s)",
        counter.operations(batch),
        units,
        ("token_pairs", "patch_pairs", "time_pairs", "step_pairs", "cross_pairs"),
        (
            layers_of("pi07, backbone layer", text.num_hidden_layers, units["tokens"],
                      widths(text, heads)),
            layers_of("pi07, expert layer", text.num_hidden_layers, units["steps"],
                      widths(expert, heads)),
            layers_of("pi07, tower layer", vision.num_hidden_layers, units["patches"],
                      widths(vision, 3 * vision.hidden_size)),
        ),
        parameters,
        sharding_bytes(parameters),
        samples,
        recompute,
    )  # fmt: skip


def table(runs: list[tuple[Run, Device]]) -> tuple[Table, list[dict[str, Any]]]:
    rows, found = [], []
    for run, device in runs:
        e = run.estimate(device)
        found.append({"run": run.name, "device": device.name, **e})
        parts = ("products", "attention", "memory", "update", "collectives")
        rows.append(
            [f"{run.name}{', recomputed' if run.recompute else ''}, {device.name}",
             f"{run.parameters / 1e9:.2f}", f"{e['flops'] / 1e12:.0f}", f"{e['bytes'] / 1e9:.0f}",
             f"{e['launches']:,.0f}", *(f"{1e3 * e[part]:.0f}" for part in parts),
             f"{1e3 * e['host']:.0f}", f"{1e3 * e['step']:.0f}", f"{e['rate']:,.1f}",
             f"{100 * e['mfu']:.0f} %"]
        )  # fmt: skip
    columns = [
        "micro-batch per GPU", "10^9 parameters", "TFLOP", "GB moved", "launches", "products ms",
        "attention ms", "memory ms", "update ms", "collectives ms", "host ms", "step ms",
        "tokens or samples/s/GPU", "MFU",
    ]  # fmt: skip
    note = (
        "One micro-batch per step on eight GPUs. TFLOP without recomputation. The step is the sum "
        "of the five parts, or the host's time if that is longer."
    )
    return Table("gpu_estimate", columns, rows, note), found


def main() -> None:
    options = parser(__doc__).parse_args()
    runs = [
        (qwen3_vl("qwen3-vl-2b", 8192, 8, False), H100),
        (qwen3_vl("qwen3-vl-8b", 8192, 8, True), H100),
        (qwen3_vl("qwen3-vl-30b-a3b", 8192, 8, True), H100),
        (pi07(16, 1, True), H100),
        (pi07(8, 1, True), A100),
        (pi07(16, 1, True), A100),
        (pi07(40, 1, True), A100),
    ]
    shown, found = table(runs)
    show(options, [shown], found)


if __name__ == "__main__":
    sys.exit(main())
