"""Write a reference case of `paddle-vl doctor`: a small model of HF transformers on torch.

    PYTHON tools/make_doctor_case.py paddle_vl/doctor/cases/qwen3_vl.safetensors
    PYTHON tools/make_doctor_case.py paddle_vl/doctor/cases/qwen3_5.safetensors
    PYTHON tools/make_doctor_case.py paddle_vl/doctor/cases/qwen4_exp.safetensors
    PYTHON tools/make_doctor_case.py paddle_vl/doctor/cases/paddleocr_vl.safetensors

PYTHON is an interpreter with torch and transformers; nothing of paddle_vl is imported. The file has
the weights under HF's names (of PaddleOCR-VL, the hub's), the batch (`in.`), logits, loss, every
gradient (`grad.`), and six greedy tokens of the first sample's prompt, all float32 or int64. Its
metadata has `config`, a config.json, and the versions. Parameters are random and away from neutral
values, so that a part that is left out changes the loss.
"""

import argparse
import json

import numpy as np

IMAGE, VIDEO, START, END = 60, 61, 62, 63
TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}  # fmt: skip
# Of Qwen3.5. Norms amplify the rounding of a first token's output, which may be near zero: with a
# large epsilon less so.
TEXT_3_5 = TEXT | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "rms_norm_eps": 1e-1,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
# Of Qwen4-Exp. A query sees up to 17 tokens, more than the batch has, since rounding to bfloat16
# changes choices; generated tokens choose.
TEXT_4 = TEXT_3_5 | {
    "output_gate_type": "sigmoid", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "hc_count": 2, "hc_lowrank": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 2,
    "ple_layer_ids": [1], "heads_per_ngram": 2, "ple_conv_kernel_size": 3, "eos_token_id": 9,
    "ngram_vocab_size_base": 20, "make_ngram_vocab_size_divisible_by": 16,
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 16,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [1],
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
# Of PaddleOCR-VL, whose files have the text's settings at the top.
TEXT_OCR = TEXT | {
    "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]},
    "rms_norm_eps": 1e-5, "pad_token_id": 0,
}  # fmt: skip
VISION_OCR = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 18, "patch_size": 4, "spatial_merge_size": 2, "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
HUBS = {
    "model.visual.": "visual.",
    "model.projector.": "mlp_AR.",
    "model.language_model.": "model.",
}
GRIDS = [[1, 4, 4], [1, 2, 4]]
NEW_TOKENS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", metavar="FILE", help="the safetensors file to write")
    options = parser.parse_args()
    # Imported here, as in the other tools for torch's interpreter.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import save_file

    is_4 = "qwen4_exp" in options.file
    is_hybrid = "qwen3_5" in options.file or is_4
    text, vision, kind = (dict(TEXT), dict(VISION), "Qwen3VL")
    if is_hybrid:
        text, vision, kind = dict(TEXT_3_5), VISION | {"deepstack_visual_indexes": []}, "Qwen3_5"
        if is_4:
            text, kind = dict(TEXT_4), "Qwen4Exp"
            del text["intermediate_size"]
        del text["rope_theta"], text["rope_scaling"]
    is_document = "paddleocr_vl" in options.file
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    values = {
        "model_type": "qwen4_exp" if is_4 else "qwen3_5" if is_hybrid else "qwen3_vl",
        "text_config": text, "vision_config": vision,
        "tie_word_embeddings": False, "image_token_id": IMAGE, "video_token_id": VIDEO,
        "vision_start_token_id": START, "vision_end_token_id": END,
    }  # fmt: skip
    if is_document:
        kind = "PaddleOCRVL"
        values |= {"model_type": "paddleocr_vl", **TEXT_OCR, "vision_config": VISION_OCR}
        del values["text_config"]
    config = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps(values)))
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    model = model_class._from_config(config, attn_implementation="eager")
    model = model.float()
    # A draw whose gradients are well above rounding.
    rng = np.random.default_rng(5 if is_document else 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            value = rng.standard_normal(shape) * (
                0.1 if len(shape) == 1 else 1.4 / shape[-1] ** 0.5
            )
            if "norm" in name and name.endswith("weight"):
                is_centred = is_hybrid and "visual" not in name and "linear_attn" not in name
                value = (0 if is_centred else 1) + 2 * value
            if name.endswith(("A_log", "dt_bias")):
                # Slow decay, of whose float32 sums HF takes differences.
                value -= 2
            parameter.copy_(torch.tensor(value.astype(np.float32)))
    first = [5, 6, START, *[IMAGE] * 4, END, 7, 8, 9, 10, 11, 12]
    second = [3, START, *[IMAGE] * 2, END, 13, 14]
    rows, length = (first, second), max(len(first), len(second))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    labels = np.where((mask == 1) & (ids < IMAGE), ids, -100)
    labels[:, 0] = -100
    patch = [3 * VISION["temporal_patch_size"] * VISION["patch_size"] ** 2]
    if is_document:
        patch = [3, VISION_OCR["patch_size"], VISION_OCR["patch_size"]]
    count = sum(int(np.prod(grid)) for grid in GRIDS)
    batch = {
        "input_ids": ids, "attention_mask": mask, "labels": labels,
        "pixel_values": rng.standard_normal((count, *patch)).astype(np.float32),
        "image_grid_thw": np.array(GRIDS),
    }  # fmt: skip
    given = {name: torch.tensor(array) for name, array in batch.items()}
    kinds = torch.tensor((ids == IMAGE).astype(np.int32))
    output = model(**given, mm_token_type_ids=kinds)
    output.loss.backward()
    model.eval()
    prompt = {
        "input_ids": given["input_ids"][:1, : len(first) - 2],
        "attention_mask": given["attention_mask"][:1, : len(first) - 2],
        "pixel_values": given["pixel_values"][:16], "image_grid_thw": given["image_grid_thw"][:1],
        "mm_token_type_ids": kinds[:1, : len(first) - 2],
    }  # fmt: skip
    tokens = model.generate(
        **prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )[:, -NEW_TOKENS:]
    parameters = {hubs_name(name, is_document): p for name, p in model.named_parameters()}
    arrays = {name: p.detach().numpy() for name, p in parameters.items()}
    # An indexer has no gradient.
    trained = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    arrays |= {f"grad.{name}": grad.numpy() for name, grad in trained.items()}
    # Hashes of n-grams.
    arrays |= {
        name: buffer.numpy()
        for name, buffer in model.named_buffers()
        if ".ple_embedding." in name and not buffer.is_floating_point()
    }
    arrays |= {f"in.{name}": array for name, array in batch.items()}
    arrays |= {
        "logits": output.logits.detach().numpy(),
        "loss": output.loss.detach().numpy().reshape(1),
        "tokens": tokens.numpy(),
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}"
    save_file(arrays, options.file, {"config": json.dumps(values), "made_with": made_with})
    print(f"loss {output.loss.item():.6f}, tokens {tokens.tolist()}")


def hubs_name(name: str, is_document: bool) -> str:
    """The key in the hub's files of a parameter, which for PaddleOCR-VL is another."""
    for module, hubs in HUBS.items() if is_document else ():
        if name.startswith(module):
            return hubs + name.removeprefix(module)
    return name


if __name__ == "__main__":
    main()
