"""pi07's planner: losses, gradients and greedy decoding."""

import numpy as np

from paddle_vl.checkpoint.reading import fill_parameters
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.families.pi07.checkpoint_map import engine_keys
from paddle_vl.families.pi07.config import PI07PlannerConfig
from paddle_vl.families.pi07.decoder import block_mask, prefix_positions
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.policy_model import as_tensors
from paddle_vl.families.pi07.prefix_layout import PLANNER_LABELS, Presence, presence_of
from parity.comparison import CaseReport
from parity.pi07_golden import GoldenCase
from parity.pi07_quantities import Comparison, array

_TEXTS = ("lang", "metadata", "memory", "response")
_SETTINGS = (
    "prompt_max_length",
    "metadata_max_length",
    "memory_max_length",
    "response_max_length",
    "attention_implementation",
)


def run_planner(case: GoldenCase, report: CaseReport) -> None:
    """Embedded prefix, losses, decoded tokens, and gradients if the case has any."""
    compare, batch = Comparison(case, report), _batch(case)
    model = _model(case, batch)
    tensors = as_tensors(batch)
    presence = Presence(False, presence_of(batch).metadata, False)
    assert model.prefix is not None, "a full model has all layers"
    prefix = model.prefix(tensors, presence, training=True)
    compare.check(
        "prefix",
        {
            "out.embed_prefix.embs": array(prefix.embs),
            "out.embed_prefix.pad_masks": array(prefix.pad_masks),
            "out.embed_prefix.att_masks": array(prefix.att_masks),
            "out.prefix.att_2d_mask": array(block_mask(prefix.pad_masks, prefix.att_masks)),
            "out.prefix.position_ids": array(prefix_positions(prefix.pad_masks)),
        },
    )
    losses = model(batch)
    compare.check("loss", {f"out.{name}": array(value) for name, value in losses.items()})
    if any(name.startswith("grad.") for name in case.tensors):
        losses["CE"].backward()
        for item in model.stored_parameters():
            if item.parameter.grad is not None:
                found = item.layout.to_stored(item.of_own(array(item.parameter.grad)))
                compare.check("grads", {f"grad.{item.key}": found})
    memory, response = model.generate(batch, *_special_tokens(case))
    names = ("out.sampled_memory", "out.sampled_response")
    tokens: dict[str, np.ndarray] = dict(zip(names, (memory, response), strict=True))
    compare.check("tokens", tokens)
    for start in ("out.", "grad."):
        compare.all_compared(start)


def _batch(case: GoldenCase) -> dict:
    """The case's inputs, cameras in lists; a video with one frame in [0, 1] becomes an image."""
    given = {name[3:]: value for name, value in case.tensors.items() if name.startswith("in.")}
    images, masks = [], []
    for i in range(len(given)):
        image = next((given[n] for n in (f"image{i}", f"images{i}", f"img{i}") if n in given), None)
        if image is None and f"video{i}" in given:
            image = given[f"video{i}"][:, -1] * 2 - 1
        if image is None:
            break
        names = (f"img_mask{i}", f"img_masks{i}", f"image_mask{i}", f"vid_mask{i}")
        images.append(image)
        masks.append(next(given[name] for name in names if name in given))
    texts = {name: value for name, value in given.items() if name.startswith(_TEXTS)}
    return texts | {"images": images, "img_masks": masks}


def _model(case: GoldenCase, batch: dict) -> PI07HighLevelPlannerModel:
    given = case.meta["config"]
    own = {name: given[name] for name in _SETTINGS if name in given}
    for text in ("memory", "response"):
        # Decoding produces as many tokens as the targets have.
        own[f"{text}_max_length"] = batch[f"{text}_tokens"].shape[1]
    vlm = given["vlm"] | {"gemma3_config": given["gemma3"], "disable_action_expert": True}
    own["vlm_config"] = vlm | {"gemma_expert_config": given.get("expert", {})}
    labels = {label: given["indicator_token_ids"][label] for label in PLANNER_LABELS}
    model = PI07HighLevelPlannerModel(PI07PlannerConfig.from_dict(own), labels)
    stored = engine_keys(read_header(case.folders.file(case.meta["weights_file"])))
    # The file also has weights of the expert and the projections, which the planner lacks.
    fill_parameters(model.stored_parameters(), stored)
    model.train()
    return model


def _special_tokens(case: GoldenCase) -> tuple[int, int]:
    """Ids of BOS and EOS, Gemma's unless the case names them."""

    def found(name: str, default: int) -> int:
        places = (case.meta, case.meta["config"], case.meta.get("special_tokens") or {})
        keys = (f"{name}_token_id", f"{name}_id", name)
        ids = [place[key] for place in places for key in keys if key in place]
        return int(np.asarray(ids[0])) if ids else default

    return found("bos", 2), found("eos", 1)
