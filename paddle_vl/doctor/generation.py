"""Greedy tokens with the key-value cache equal those without it, for one prompt and for two."""

from functools import partial
from typing import Any

import numpy as np
import paddle

from paddle_vl.doctor.check import BFLOAT16, Check, Dtype, Machine, Result, ok, wrong
from paddle_vl.testing import Image, tiny_qwen3_vl, tiny_qwen3_vl_batch

_TOKENS = 8
# Where the two best logits are closer than this, either may win.
_GAP = {"float32": 1e-3, "bfloat16": 1e-1}


def checks(machine: Machine) -> list[Check]:
    return [
        Check(
            "generation.float32",
            "cached tokens equal uncached ones, batches of 1 and 2",
            partial(_generation, "float32"),
        ),
        Check(
            "generation.bfloat16",
            "the same in bfloat16, through flash attention",
            partial(_generation, "bfloat16"),
            (BFLOAT16,),
        ),
    ]


def _generation(dtype: Dtype, machine: Machine) -> Result:
    model = tiny_qwen3_vl()
    if dtype != "float32":
        model.to(dtype=dtype)
    model.eval()
    table = []
    for size in (1, 2):
        batch = prompts(size)
        cached = model.generate(**batch, max_new_tokens=_TOKENS, do_sample=False)
        disagreement, compared = _first_disagreement(model, batch, cached, _GAP[dtype])
        table.append({"batch": size, "tokens": cached.tolist(), "compared": compared})
        if disagreement is not None:
            return wrong(
                f"batch of {size} in {dtype}: {disagreement}",
                "the cache or attention of a single query is wrong here: run "
                "kernels.causal_attention and attention.backends",
                table=table,
            )
    number = sum(row["compared"] for row in table)
    return ok(f"{number} tokens equal those without a cache", table=table)


def prompts(size: int) -> dict[str, np.ndarray]:
    """Prompts of a picture and text, padded on the left: the second one is shorter."""
    rows = [(1, Image(4, 4), 5, 6, 7), (Image(2, 4), 9)][:size]
    batch = tiny_qwen3_vl_batch(*rows, pad_to_multiple_of=1)
    del batch["labels"]
    for name in ("input_ids", "attention_mask"):
        # Real tokens to the right end.
        batch[name] = np.stack(
            [
                np.roll(row, int((mask == 0).sum()))
                for row, mask in zip(batch[name], _mask(size, rows), strict=True)
            ]
        )
    return batch


def _mask(size: int, rows: Any) -> np.ndarray:
    return tiny_qwen3_vl_batch(*rows, pad_to_multiple_of=1)["attention_mask"]


def _first_disagreement(
    model: Any, batch: dict[str, np.ndarray], cached_BN: np.ndarray, gap: float
) -> tuple[str | None, int]:
    """The first token that the whole sequence, without a cache, contradicts; and how many were
    compared. Tokens whose two best logits are within the gap are not."""
    prompt = batch["input_ids"].shape[1]
    ids_BL = np.concatenate([batch["input_ids"], cached_BN], axis=1)
    ones = np.ones_like(cached_BN)
    mask_BL = np.concatenate([batch["attention_mask"], ones], axis=1)
    visual = {k: v for k, v in batch.items() if k not in ("input_ids", "attention_mask")}
    with paddle.no_grad():
        output = model(input_ids=ids_BL, attention_mask=mask_BL, **visual)
    logits_BLV = output.logits.astype("float32").numpy()
    compared = 0
    for row in range(len(ids_BL)):
        for number in range(cached_BN.shape[1]):
            logits_V = logits_BLV[row, prompt + number - 1]
            if not np.isfinite(logits_V).all():
                return f"logits are not finite at token {number} of prompt {row}", compared
            second, best = np.sort(logits_V)[-2:]
            if best - second <= gap:
                continue
            compared += 1
            if int(logits_V.argmax()) != int(cached_BN[row, number]):
                return (
                    f"token {number} of prompt {row} is {cached_BN[row, number]} with the cache "
                    f"and {int(logits_V.argmax())} without",
                    compared,
                )
    return None, compared
