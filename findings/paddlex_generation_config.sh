#!/usr/bin/env bash
# A PaddleOCR-VL folder's generation_config.json in PaddleX's own engine. `predict` takes
# repetition_penalty, temperature and top_p, and warns that the local model ignores them; one would
# expect the same of the file, which fine-tuning tools write. With PaddleX 3.7.2:
# - repetition_penalty of the file is followed: other tokens, without a message; the one that is
#   passed is ignored, with a warning;
# - do_sample of the file makes every question fail with a TypeError about an argument `cache`.
# So a folder that loads may answer nothing, or otherwise than was asked for.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip install -q "$@"; }
pip paddlepaddle==3.3.1 "numpy<2.4" safetensors==0.8.0 pillow==13.0.0
pip --no-deps paddlex==3.7.2
pip PyYAML==6.0.2 ruamel.yaml==0.19.1 prettytable==3.18.0 colorlog==6.12.0 filelock==4.3.1 \
    chardet==7.7.0 pydantic==2.14.4 requests==2.34.2 ujson==6.1.0 packaging==26.4 pandas==3.1.1 \
    huggingface_hub==2.4.0 sentencepiece==0.2.3 jinja2==3.1.6 cffi==2.1.1 regex==2026.11.19 \
    einops==0.8.2 modelscope==1.40.2 aistudio-sdk==0.3.9
PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK=1 "$work/venv/bin/python" - "$work/model" <<'PYTHON' \
    2>"$work/log" || { tail -3 "$work/log"; exit 1; }
import json
import sys
from pathlib import Path

import numpy as np
import sentencepiece
from PIL import Image
from safetensors.numpy import save_file

folder = Path(sys.argv[1])
folder.mkdir()
image = ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"]
text = folder / "text.txt"
text.write_text("User: read this page\nAssistant: the text of the page\n" * 20)
sentencepiece.SentencePieceTrainer.train(
    input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=320, model_type="bpe",
    byte_fallback=True, add_dummy_prefix=False, hard_vocab_limit=False, minloglevel=2,
    user_defined_symbols=image,
)
pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
ids = [pieces.piece_to_id(name) for name in image]
wide, inner, vocabulary, tower = 32, 48, pieces.get_piece_size(), 24
config = {
    "model_type": "paddleocr_vl", "hidden_size": wide, "intermediate_size": inner, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": vocabulary, "rms_norm_eps": 1e-5, "rope_theta": 500000, "use_bias": False,
    "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
    "max_position_embeddings": 512, "image_token_id": ids[0], "vision_start_token_id": ids[1],
    "video_token_id": vocabulary, "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "paddleocr_vl", "hidden_size": tower, "intermediate_size": inner,
        "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        "num_channels": 3, "spatial_merge_size": 2, "vision_use_head": False,
    },
}  # fmt: skip
rng, weights = np.random.default_rng(0), {}


def add(name, *shape):
    weights[name] = rng.normal(0, 0.5, shape).astype(np.float32)


vision = "visual.vision_model."
add(f"{vision}embeddings.patch_embedding.weight", tower, 3, 14, 14)
add(f"{vision}embeddings.patch_embedding.bias", tower)
add(f"{vision}embeddings.position_embedding.weight", 16, tower)
add(f"{vision}embeddings.packing_position_embedding.weight", 32768, tower)
layer = f"{vision}encoder.layers.0."
linears = {f"self_attn.{n}_proj": (tower, tower) for n in ("q", "k", "v", "out")}
linears |= {"mlp.fc1": (inner, tower), "mlp.fc2": (tower, inner)}
for name, shape in linears.items():
    add(f"{layer}{name}.weight", *shape)
    add(f"{layer}{name}.bias", shape[0])
for name in (f"{layer}layer_norm1", f"{layer}layer_norm2", f"{vision}post_layernorm"):
    add(f"{name}.weight", tower)
    add(f"{name}.bias", tower)
for name, rows, columns in (("linear_1", 4 * tower, 4 * tower), ("linear_2", wide, 4 * tower)):
    add(f"mlp_AR.{name}.weight", rows, columns)
    add(f"mlp_AR.{name}.bias", rows)
add("mlp_AR.pre_norm.weight", tower)
add("mlp_AR.pre_norm.bias", tower)
add("model.embed_tokens.weight", vocabulary, wide)
add("model.norm.weight", wide)
add("lm_head.weight", vocabulary, wide)
for number in range(2):
    layer = f"model.layers.{number}."
    for name in ("q", "k", "v", "o"):
        add(f"{layer}self_attn.{name}_proj.weight", wide, wide)
    for name, *shape in (("gate", inner, wide), ("up", inner, wide), ("down", wide, inner)):
        add(f"{layer}mlp.{name}_proj.weight", *shape)
    for name in ("input_layernorm", "post_attention_layernorm"):
        add(f"{layer}{name}.weight", wide)
save_file(weights, folder / "model.safetensors")
(folder / "config.json").write_text(json.dumps(config))
half = [0.5, 0.5, 0.5]
images = {"min_pixels": 784, "max_pixels": 7840, "image_mean": half, "image_std": half}
(folder / "preprocessor_config.json").write_text(json.dumps(images))
(folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
(folder / "inference.yml").write_text("Global: {model_name: PaddleOCR-VL-1.5-0.9B}\n")
(folder / "chat_template.jinja").write_text(
    "User: <|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    "{{ messages[0].content[1].text }}\nAssistant:\n"
)
Image.fromarray(rng.integers(0, 256, (56, 84, 3), dtype=np.uint8)).save(folder / "page.png")

from paddlex import create_model
from paddlex.version import get_pdx_version

print("paddlex", get_pdx_version())
question = {"image": str(folder / "page.png"), "query": "read"}


def answer(settings, **given):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | settings))
    model = create_model("PaddleOCR-VL-1.5-0.9B", model_dir=str(folder), device="cpu")
    try:
        found = next(iter(model.predict(question, max_new_tokens=12, **given)))["result"]
    except TypeError as error:
        found = f"TypeError: {error}"
    print(f"{settings} in the file, {given} passed:\n  {found!r}")
    return found


greedy = answer({})
passed = answer({}, repetition_penalty=5.0)
in_file = answer({"repetition_penalty": 5.0})
sampled = answer({"do_sample": True})
if passed != greedy or in_file == greedy or "unexpected keyword argument 'cache'" not in sampled:
    sys.exit("The behaviour changed: file and arguments may now agree.")
PYTHON
