"""Golden cases of Qwen4-Exp: hashes, files, forward and backward, generation whole and in pieces,
trajectories.

Tolerances are those of the golden README, for float32: activations and logits 4e-5 absolute, index
scores 6e-5, of the first DeltaNet layer's convolution, delta rule and state and of the first
embedding of n-grams 5e-6, loss 5e-6, gradients 5e-5 relative to the largest entry of each tensor,
in models with n-grams 1e-6 over the least argument of their gates besides, the norm of all 2e-5.
Rows of tables, chosen blocks, experts and tokens are equal. Statistics of gradients are compared as
Qwen3.5's. Along a trajectory it is ten times the drift of the reference from float64, where that is
more.
"""

import json
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_vl.batch.schema import GRIDS, PIXELS
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.families.qwen4_exp.config import Qwen4ExpConfig
from paddle_vl.families.qwen4_exp.model import Qwen4ExpForConditionalGeneration
from paddle_vl.families.vlm.answering.generate import EmbeddedPrompts
from paddle_vl.families.vlm.modeling.call_arguments import called_batch
from paddle_vl.nn.ngram_embedding import ngram_hash, ngram_rows
from parity.comparison import CaseReport
from parity.golden import Qwen4Folders, QwenCase
from parity.qwen3_5 import compare_states, generated_logits, last_logits
from parity.qwen4_exp_recording import IndexKeys, Qwen4Recording
from parity.qwen_vl import (
    POSITION_INPUTS,
    compare_gradients,
    compare_losses,
    compare_routers,
    compare_steps,
    given_of,
    of_towers,
    real_tokens,
    train_steps,
    unsupported,
    values_of,
)
from parity.recording import array, weights

FOLDERS = Qwen4Folders
ACTIVATION, SCORE, FIRST_LAYER, LOSS, GRADIENT, GLOBAL_NORM = 4e-5, 6e-5, 5e-6, 5e-6, 5e-5, 2e-5


def run_cases(golden: Qwen4Folders, cases: list[QwenCase], scale: float, dtype: str):
    """One report per case."""
    for case in cases:
        report = CaseReport(case.name, scale)
        if case.kind == "hash":
            _compare_hashes(case, report)
        elif case.kind == "files":
            _compare_files(golden, case, report)
        else:
            report.unsupported = unsupported(golden, case, case.meta["model"], dtype, "qwen4")
            if not report.unsupported:
                folder = golden.models[case.meta["model"]]
                model = Qwen4ExpForConditionalGeneration.from_pretrained(folder, dtype=dtype)
                _RUNS[case.kind](golden, model, case, report)
        yield report


def _compare_hashes(case: QwenCase, report: CaseReport) -> None:
    """Constants, size of the table, and rows of ids."""
    for name, given in case.meta.items():
        made = ngram_hash(
            given["number_among_ple_layers"],
            given["ngram_size"],
            given["heads_per_ngram"],
            given["vocab_size"],
            given["ngram_vocab_size_base"],
            given["seed"],
        )
        constants = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        for key, values in zip(constants, made, strict=True):
            report.exact("constants", f"{name}.{key}", values, case.tensors[f"{name}.{key}"])
        size = made.num_rows(given["make_ngram_vocab_size_divisible_by"])
        report.exact("constants", f"{name} rows", size, given["table_rows"])
        wanted = case.tensors[f"{name}.rows"]
        boundary = np.ravel(given["eos_token_id"])[0].item()
        found = ngram_rows(paddle.to_tensor(case.tensors[f"{name}.ids"]), made, boundary)
        report.exact("rows", f"{name}.rows", array(found).reshape(wanted.shape), wanted)


def _compare_files(golden: Qwen4Folders, case: QwenCase, report: CaseReport) -> None:
    """Both dialects of a configuration, and tensors read and written again; what transformers saved
    has the values of the model that it saved."""
    folder, model_class = case.file.parent, Qwen4ExpForConditionalGeneration
    model = model_class.from_pretrained(folder)
    own = weights(model)
    original = golden.models.get(folder.name.removesuffix("_saved"))
    if original not in (None, folder):
        config = Qwen4ExpConfig.from_pretrained(original).to_dict()
        report.exact("config", "as saved", model.config.to_dict() == config, True)
        _compare_weights("saved", weights(model_class.from_pretrained(original)), own, report)
    with tempfile.TemporaryDirectory() as place:
        hub, written = Path(place, "hub"), Path(place, "written")
        if (flat := folder / "config.hub_style.json").is_file():
            shutil.copytree(folder, hub)
            shutil.copyfile(flat, hub / "config.json")
            read = model_class.from_pretrained(hub)
            # transformers writes none of its MTP layers, whose tensors are there.
            layers = read.config.text_config.mtp_num_hidden_layers
            text = replace(model.config.text_config, mtp_num_hidden_layers=layers)
            same = read.config.to_dict() == replace(model.config, text_config=text).to_dict()
            report.exact("config", "both dialects", same, True)
            _compare_weights("hub", weights(read), own, report)
        model.save_pretrained(written)
        again = model_class.from_pretrained(written)
        report.exact("config", "written", again.config.to_dict() == model.config.to_dict(), True)
        _compare_weights("written", weights(again), own, report)
        if (keys := folder / "keys.json").is_file():
            shapes = json.loads(keys.read_text(encoding="utf-8"))
            files = written.glob("*.safetensors")
            found = {key: list(t.shape) for file in files for key, t in read_header(file).items()}
            report.exact("keys", "written", found == shapes, True)


def _compare_weights(group: str, found: dict, wanted: dict, report: CaseReport) -> None:
    report.exact(group, "keys", sorted(found) == sorted(wanted), True)
    for key in sorted(found.keys() & wanted.keys()):
        report.exact(group, key, found[key], wanted[key])


def _run_forward(golden: Qwen4Folders, model, case: QwenCase, report: CaseReport) -> None:
    report.golden = tensors = case.tensors
    inputs, host, extra, offsets, real_BL = given_of(model, case, report)
    for name, value in of_towers(model, inputs):
        if name in tensors:
            report.absolute("tower", name, value, ACTIVATION)
    if offsets is None and not any("grid" in name for name in inputs):
        # Without images the reference counts padding too: rotations differ, their products do not.
        columns = np.broadcast_to(np.arange(real_BL.shape[1]), (3, *real_BL.shape))
        inputs = inputs | {"position_ids": columns}
    with Qwen4Recording(model) as recorded:
        output = model(**inputs, **extra)
    has_end = np.ones([len(real_BL)], bool) if offsets is not None else real_BL[:, -1]
    for name, value in recorded.quantities(offsets).items():
        if name not in tensors:
            continue
        if "state" in name:
            # A state behind padding means nothing.
            rows = ... if offsets is not None else has_end
            tolerance = FIRST_LAYER if name == "lm.state.0" else ACTIVATION
            report.absolute("states", name, value[rows], tolerance, tensors[name][rows])
            continue
        shape = (*real_BL.shape, -1)
        found, wanted = (x.reshape(shape)[real_BL] for x in (value, tensors[name]))
        if "ple_ids" in name:
            report.exact("n-grams", name, found, wanted)
        else:
            group = "n-grams" if "ple" in name else "layers"
            report.absolute(group, name, found, _tolerance_of(name, model), wanted)
    samples = _samples(real_BL, offsets)
    for name, value in recorded.of_indexers(samples).items():
        if name in tensors:
            _compare_indexer(name, value, real_BL, report)
    compare_routers(recorded.calls, real_BL, ACTIVATION, report)
    made = {"": output, ", indices carried": model(**host, **extra)}
    only_last = "logits_last64" in tensors
    name, rows = ("logits_last64", real_BL[:, -64:]) if only_last else ("logits", real_BL)
    for note, each in made.items():
        found, wanted = last_logits(each, only_last)[rows], tensors[name][rows]
        report.absolute("logits", f"{name}{note}", found, ACTIVATION, wanted)
    report.compared.add(name)
    compare_losses(made, LOSS, report)
    report.all_compared()
    output.loss.backward()
    least = case.meta["min_abs_ple_gate"]
    tolerance = GRADIENT + (1e-6 / least if least else 0.0)
    compare_gradients(model, case, report, tolerance, GLOBAL_NORM)


def _tolerance_of(name: str, model) -> float:
    kind, _, layer = name.removeprefix("lm.").partition(".")
    first = next(iter(model.config.text_config.ngram_layers), None)
    if kind in ("conv_out", "core_out") and layer == "0":
        return FIRST_LAYER
    return FIRST_LAYER if kind.startswith("ple_") and layer == str(first) else ACTIVATION


def _samples(real_BL: np.ndarray, offsets: np.ndarray | None) -> list[tuple[int, int, int]]:
    """Row, first column and length of each sample."""
    if offsets is not None:
        return [(0, begin, end - begin) for begin, end in pairwise(offsets)]
    return [(row, int(real_L.argmax()), int(real_L.sum())) for row, real_L in enumerate(real_BL)]


def _compare_indexer(name: str, value: np.ndarray, real_BL: np.ndarray, report: CaseReport) -> None:
    wanted = report.golden[name]
    if "block_keys" in name:
        report.absolute("indexer", name, value, ACTIVATION)
    elif "selected" in name:
        report.exact("choice", name, value[real_BL], wanted[real_BL])
    else:
        tolerance = SCORE if "scores" in name else ACTIVATION
        report.absolute("indexer", name, value[real_BL], tolerance, wanted[real_BL])


def _run_generation(golden: Qwen4Folders, model, case: QwenCase, report: CaseReport) -> None:
    """Greedy tokens, logits of every step, positions, and what layers keep."""
    report.golden = case.tensors
    for name, value in of_towers(model, case.inputs()):
        if name in case.tensors:
            report.absolute("tower", name, value, ACTIVATION)
    real_BL = real_tokens(case.inputs())
    with IndexKeys(model) as keys:
        compare = partial(_compare_kept, keys=keys, real_BL=real_BL, report=report)
        logits = generated_logits(model, case, compare, report)
    report.absolute("logits", "step_logits", logits, ACTIVATION)
    report.all_compared()


def _compare_kept(
    caches: list, when: str, keys: IndexKeys, real_BL: np.ndarray, report: CaseReport
) -> None:
    """What the caches of all layers hold, and the keys that indexers have made."""
    compare_states(caches, when, report, ACTIVATION)
    for i, cache in enumerate(caches):
        if hasattr(cache, "ngram_ids_BN"):
            report.exact("states", f"{when}.ngram_context.{i}", array(cache.ngram_ids_BN))
            rows = array(cache.ngram_rows_BPC).transpose(0, 2, 1)
            report.absolute("states", f"{when}.ple_conv_state.{i}", rows, ACTIVATION)
    for i, found in keys.so_far().items():
        name = f"{when}.indexer_keys.{i}"
        more = np.ones([len(real_BL), found.shape[1] - real_BL.shape[1]], bool)
        real_BS = np.concatenate([real_BL, more], axis=1)
        report.absolute("states", name, found[real_BS], ACTIVATION, report.golden[name][real_BS])


def _run_pieces(golden: Qwen4Folders, model, case: QwenCase, report: CaseReport) -> None:
    """Logits of prompts whose columns run in pieces, and what layers keep."""
    report.golden, inputs = case.tensors, case.inputs()
    report.compared |= {name for name in case.tensors if name.startswith("in.")}
    for name, value in of_towers(model, inputs):
        if name in case.tensors:
            report.absolute("tower", name, value, ACTIVATION)
    ids_BL, mask_BL = inputs["input_ids"], inputs.get("attention_mask")
    visual = {name: inputs[name] for name in (*PIXELS, *GRIDS) if name in inputs}
    position_ids, _ = model.position_ids(*values_of(inputs, POSITION_INPUTS))
    model.eval()
    with paddle.no_grad(), IndexKeys(model) as keys:
        given = {"position_ids": position_ids, **visual}
        batch = called_batch(model.config, model.placement.ops, ids_BL, **given)
        prompts = EmbeddedPrompts(model, ids_BL, position_ids, model.encode_visual(batch), mask_BL)
        caches, begin, logits = model.new_caches(ids_BL.shape[1], None), 0, []
        for length in case.meta["splits"]:
            hidden = prompts.run(begin, begin + length, caches)
            logits.append(array(model.lm_head(hidden)))
            begin += length
        real_BL = real_tokens(inputs)
        _compare_kept(caches, "end", keys, real_BL, report)
    found, wanted = np.concatenate(logits, axis=1)[real_BL], case.tensors["logits"][real_BL]
    report.absolute("logits", "logits", found, ACTIVATION, wanted)
    report.all_compared()


def _run_trajectory(golden: Qwen4Folders, model, case: QwenCase, report: CaseReport) -> None:
    """Loss and gradient norm of each step of training."""
    batch = golden.case(case.meta["batch_from"]).inputs()
    wanted, drift = case.meta["steps"], case.meta["relative_drift_float32_vs_float64"]
    steps = train_steps(model, batch, case.meta["optimizer"], len(wanted))
    largest = max(step["loss"] for step in wanted)
    spread = {
        "loss": max(drift["loss"]) * largest, "grad_norm_relative": max(drift["grad_norm"]),
    }  # fmt: skip
    compare_steps(steps, wanted, spread, LOSS, GRADIENT, report)


_RUNS: dict[str, Any] = {
    "forward": _run_forward, "generation": _run_generation, "pieces": _run_pieces,
    "trajectory": _run_trajectory,
}  # fmt: skip
