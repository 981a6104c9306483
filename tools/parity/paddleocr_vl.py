"""Golden cases of PaddleOCR-VL: forward and backward, generation, trajectories; inputs.

Tolerances are those of the golden README, for float32: activations and logits 2e-5 absolute, loss
5e-6, gradients 2e-5 relative to the largest entry of each tensor; of statistics of a gradient the
norm so, the others as of Qwen3-VL. Trajectories 1e-4 relative. HF's patches are in raster order,
those of this package's tower in merge-block order.
"""

from collections.abc import Callable, Iterator

import numpy as np
import paddle

from paddle_vl import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration
from paddle_vl.batch.positions import PatchRows, frame_runs, in_blocks, patch_places
from paddle_vl.nn.attention import Segments, vision_tables
from parity.comparison import CaseReport
from parity.golden import PaddleOCRFolders, QwenCase
from parity.paddleocr_vl_inputs import compare_processor, compare_templates
from parity.qwen_vl import (
    compare_generated,
    compare_gradients,
    compare_losses,
    given_of,
    train_steps,
    unsupported,
)
from parity.qwen_vl_recording import DecoderRecording
from parity.recording import Recording, array

FOLDERS = PaddleOCRFolders
ACTIVATION, LOSS, GRADIENT, TRAJECTORY = 2e-5, 5e-6, 2e-5, 1e-4
# What compares cases without a model, by kind: called with the case and the scale of tolerances.
OF_INPUTS: dict[str, Callable[[QwenCase, float], Iterator[CaseReport]]] = {
    "processor": compare_processor,
    "templates": compare_templates,
}


def run_cases(golden: PaddleOCRFolders, cases: list[QwenCase], scale: float, dtype: str):
    """One report per case, or several of a case without a model."""
    for case in cases:
        if case.kind in OF_INPUTS:
            yield from OF_INPUTS[case.kind](case, scale)
            continue
        report = CaseReport(case.name, scale)
        if "model" not in case.meta:
            report.unsupported = f"cases of the kind {case.kind} are not compared"
        else:
            name = case.meta["model"]
            report.unsupported = unsupported(golden, case, name, dtype, "paddleocr_vl")
        if not report.unsupported:
            folder = golden.models[name]
            model = PaddleOCRVLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
            flat = folder / "config.hub_style.json"
            if flat.is_file():
                found = PaddleOCRVLConfig.from_pretrained(flat).to_dict()
                own = model.config.to_dict()
                report.exact("config", "both dialects", found == own, True)
            _RUNS[case.kind](golden, model, case, report)
        yield report


def patches_in_blocks(model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs with flattened patches in merge-block order."""
    if "pixel_values" not in inputs:
        return inputs
    pixels = inputs["pixel_values"]
    order = in_blocks(inputs["image_grid_thw"], model.config.vision_config.spatial_merge_size)
    return inputs | {"pixel_values": pixels.reshape(len(pixels), -1)[order]}


def _run_forward(golden: PaddleOCRFolders, model, case: QwenCase, report: CaseReport) -> None:
    report.golden = tensors = case.tensors
    inputs, host, extra, _, real_BL = given_of(model, case, report)

    def compare(group: str, name: str, found, rows) -> None:
        if name in tensors:
            wanted = tensors[name][rows]
            report.absolute(group, name, np.asarray(found), ACTIVATION, wanted)

    if "pixel_values" in inputs:
        order = in_blocks(inputs["image_grid_thw"], model.config.vision_config.spatial_merge_size)
        for name, value in _tower_quantities(model, patches_in_blocks(model, inputs)).items():
            compare("tower", f"vis_image.{name}", value, ... if name == "merged" else order)
    with DecoderRecording(model) as recorded:
        output = model(**inputs, **extra)
    for name, value in recorded.quantities().items():
        compare("embeds" if "embeds" in name else "layers", name, value[real_BL], real_BL)
    carried = model(**patches_in_blocks(model, host), **extra)
    made = {"": output, ", indices carried": carried}
    for group, (note, each) in zip(("logits", "carried"), made.items(), strict=True):
        logits, wanted = array(each.logits)[real_BL], tensors["logits"][real_BL]
        report.absolute(group, f"logits{note}", logits, ACTIVATION, wanted)
    report.compared.add("logits")
    compare_losses(made, LOSS, report)
    report.all_compared()
    output.loss.backward()
    compare_gradients(model, case, report, GRADIENT)


def _tower_quantities(model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names and values inside tower and projector, of patches in merge-block order."""
    tower, config, grid = model.visual, model.config.vision_config, inputs["image_grid_thw"]
    places = PatchRows(*map(paddle.to_tensor, patch_places(grid, config).values()))
    layers = {
        "patch_embed": tower.patch_embed,
        "pos_embed": tower.pos_embed,
        "post_norm": tower.post_layernorm,
    }
    for i, block in enumerate(tower.blocks):
        layers |= {f"block_out.{i}": block, f"attn_out.{i}": block.self_attn}
    with paddle.no_grad(), Recording(layers, array) as recorded:
        pixels = paddle.to_tensor(inputs["pixel_values"])
        features = tower(pixels, places, Segments(frame_runs(grid)))
    found = {name: calls[0] for name, calls in recorded.calls.items() if "input" not in name}
    found["block_in"] = recorded.calls["block_out.0 input"][0][0]
    width = config.hidden_size // config.num_heads
    tables = vision_tables(places.coordinates, width, config.rope_theta)
    found["rope_cos"], found["rope_sin"] = map(array, tables)
    return found | {"merged": array(features.merged)}


def _run_generation(golden: PaddleOCRFolders, model, case: QwenCase, report: CaseReport) -> None:
    """Greedy tokens, the logits of every step and the positions behind them."""
    report.golden = case.tensors
    logits: list[np.ndarray] = []
    compare_generated(model, case, logits.append, report)
    report.absolute("logits", "step_logits", np.stack(logits, axis=1), ACTIVATION)


def _run_trajectory(golden: PaddleOCRFolders, model, case: QwenCase, report: CaseReport) -> None:
    """Loss and gradient norm of each step of training."""
    batch = patches_in_blocks(model, golden.case(case.meta["batch_from"]).inputs())
    wanted = case.meta["steps"]
    steps = train_steps(model, batch, case.meta["optimizer"], len(wanted))
    for i, (found, step) in enumerate(zip(steps, wanted, strict=True)):
        report.relative("loss", f"loss of step {i}", found[0], TRAJECTORY, step["loss"])
        report.relative("norm", f"norm of step {i}", found[1], TRAJECTORY, step["grad_norm"])


_RUNS = {"forward": _run_forward, "generation": _run_generation, "trajectory": _run_trajectory}
