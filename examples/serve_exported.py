"""Serve an exported Qwen3-VL without paddle_vl: paddle.inference, NumPy, tokenizers and Pillow.

    paddle-vl export --model runs/digits --output exports/digits
    python examples/serve_exported.py exports/digits digit.png "Which digit is this?"

One question about one image, answered greedily. It shows what a server in another language must do:
the prompt, the patches, the positions, and the three programs. export.json has their inputs.

Shapes: P patches, L prompt length, C capacity of the buffers, Y rows and X columns of patches.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paddle
from paddle import inference
from PIL import Image, ImageOps
from tokenizers import Tokenizer


class Program:
    """A program of the folder on Paddle's predictor."""

    def __init__(self, folder: Path, name: str, entry: dict):
        config = inference.Config(str(folder / f"{name}.json"), str(folder / entry["weights"]))
        config.disable_glog_info()
        config.enable_new_ir(True)
        config.enable_new_executor(True)
        config.enable_memory_optim()
        if paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count():
            config.enable_use_gpu(256, 0)
        else:
            config.disable_gpu()
            # oneDNN's in-place pass gives wrong cosines in silence (paddlepaddle 3.3.1).
            config.disable_mkldnn()
        threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
        config.set_cpu_math_library_num_threads(int(threads))
        self.predictor = inference.create_predictor(config)

    def __call__(self, inputs: dict) -> list:
        """Outputs in order; a program may write into the tensors among its inputs."""
        given = [inputs[name] for name in self.predictor.get_input_names()]
        return self.predictor.run(
            [x if isinstance(x, paddle.Tensor) else paddle.to_tensor(x) for x in given]
        )


def checked_manifest(folder: Path) -> dict:
    """The content of export.json, after the sizes of the files were compared.

    `paddle_vl.export.load` compares their checksums and the programs' stored answers too.
    """
    manifest = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    if (manifest["format"], manifest["model_type"]) != (2, "qwen3_vl"):
        raise ValueError(f"{folder} is no export of Qwen3-VL in format 2")
    files = manifest["files"]
    for name, program in manifest["programs"].items():
        if not {f"{name}.json", program["weights"]} <= set(files):
            raise ValueError(f"{folder}: the files of {name} are not in export.json; export again")
    for name, sums in files.items():
        file = folder / name
        # A name with .. would lead out of the folder.
        is_inside = file.resolve().is_relative_to(folder.resolve())
        if not is_inside or not file.is_file() or file.stat().st_size != sums["size"]:
            raise ValueError(f"{folder}: {name} is missing or damaged; export again")
    return manifest


class ServedModel:
    """The programs of an exported folder, its tokenizer and the settings of its images."""

    def __init__(self, folder: Path):
        manifest = checked_manifest(folder)
        self.sizes = manifest["sizes"]
        self.tower, self.prefill, self.decode = (
            Program(folder, name, manifest["programs"][name])
            for name in ("tower", "prefill", "decode")
        )
        self.cache_names = [
            name
            for name in manifest["programs"]["decode"]["inputs"]
            if name[:4] in ("key_", "valu")
        ]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.stop = [self.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
        self.image = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))

    def answer(self, image: Path, question: str, max_new_tokens: int = 128) -> Iterator[int]:
        """Greedy tokens until the answer ends."""
        pixels, (rows_Y, columns_X) = self._patches(Image.open(image))
        merge = self.sizes["merge"]
        embeds, *levels = self.tower(
            {"pixel_values": pixels, **self._tower_layout(rows_Y, columns_X)}
        )
        before, pads, after = self._prompt(question, (rows_Y // merge) * (columns_X // merge))
        prompt = [*before, *pads, *after]
        positions_3L = self._positions(len(before), rows_Y // merge, columns_X // merge, len(after))
        logits, *keys_values = self.prefill(
            {
                "input_ids": np.array([prompt]),
                "attention_mask": np.ones((1, len(prompt)), dtype=np.int64),
                "position_ids": positions_3L[:, None],
                "visual_embeds": embeds,
                **{f"level_{g}": level for g, level in enumerate(levels)},
            }
        )
        # Buffers with room for the answer; the decode step writes into them.
        capacity = len(prompt) + max_new_tokens
        buffers = []
        for tensor in keys_values:
            past = tensor.numpy()
            room = [*past.shape[:2], capacity - len(prompt), past.shape[3]]
            zeros = np.zeros(room, dtype=past.dtype)
            buffers.append(paddle.to_tensor(np.concatenate([past, zeros], axis=2)))
        position = int(positions_3L.max()) + 1
        for step in range(max_new_tokens):
            token = int(logits.numpy()[0].argmax())
            if token in self.stop:
                return
            yield token
            place = len(prompt) + step
            (logits,) = self.decode(
                {
                    "input_ids": np.array([[token]]),
                    "attention_mask": (np.arange(capacity) <= place).astype(np.int64)[None],
                    "position_ids": np.full((3, 1, 1), position + step),
                    "place": np.array([place]),
                    **dict(zip(self.cache_names, buffers, strict=True)),
                }
            )

    def _prompt(self, question: str, num_visual: int) -> tuple[list[int], list[int], list[int]]:
        """Ids before the image's placeholders, the placeholders, and ids after them."""

        def ids(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        start, end, vision_start, vision_end = (
            self.tokenizer.token_to_id(f"<|{name}|>")
            for name in ("im_start", "im_end", "vision_start", "vision_end")
        )
        before = [start, *ids("user\n"), vision_start]
        after = [vision_end, *ids(question), end, *ids("\n"), start, *ids("assistant\n")]
        if forged := {start, end, vision_start, vision_end} & set(ids(question)):
            raise ValueError(f"the question contains control tokens: {sorted(forged)}")
        return before, [self.sizes["image_token_id"]] * num_visual, after

    def _patches(self, image: Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
        """Normalized patches in merge-block order `[P, channel * frame * y * x]`, and the grid."""
        settings = self.image
        side, merge = settings["patch_size"], settings["merge_size"]
        image = ImageOps.exif_transpose(image).convert("RGB")
        height, width = _resized(
            image.height,
            image.width,
            side * merge,
            settings["size"]["shortest_edge"],
            settings["size"]["longest_edge"],
        )
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        scaled = (np.asarray(image).astype(np.float64) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(settings[f"image_{k}"], dtype=np.float32) for k in ("mean", "std"))
        pixels = ((scaled - mean) / std).transpose(2, 0, 1)
        blocks = (3, height // side // merge, merge, side, width // side // merge, merge, side)
        # Block row, block column, row and column in the block; then channel, y, x.
        patches = pixels.reshape(blocks).transpose(1, 4, 2, 5, 0, 3, 6)
        patches = patches.reshape(-1, 3, 1, side, side)
        patches = patches.repeat(settings["temporal_patch_size"], axis=2)
        return patches.reshape(len(patches), -1), (height // side, width // side)

    def _tower_layout(self, rows_Y: int, columns_X: int) -> dict[str, np.ndarray]:
        """Places of the patches, taps of the position table, and one segment of attention."""
        merge, table = self.sizes["merge"], self.sizes["table_side"]
        blocks = (rows_Y // merge, merge, columns_X // merge, merge)
        y, x = (
            axis.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1)
            for axis in np.indices((rows_Y, columns_X))
        )
        taps = []
        for place, count in ((y, rows_Y), (x, columns_X)):
            exact = place * (table - 1) / max(count - 1, 1)
            low = np.floor(exact).astype(np.int64)
            taps.append([(low, 1 - (exact - low)), (np.minimum(low + 1, table - 1), exact - low)])
        pairs = [(row, column) for row in taps[0] for column in taps[1]]
        places_P = np.arange(len(y))
        return {
            "coordinates": np.stack([y, x], axis=1),
            "tap_rows": np.stack([row * table + column for (row, _), (column, _) in pairs]),
            "tap_weights": np.stack([a * b for (_, a), (_, b) in pairs]).astype(np.float32),
            "segment_rows": places_P[None],
            "segment_bias": np.zeros((1, len(y)), dtype=np.float32),
            "segment_place": places_P,
        }

    @staticmethod
    def _positions(before: int, rows: int, columns: int, after: int) -> np.ndarray:
        """Time, row and column of every token, `[3, L]`; the image's are relative to its start."""
        y, x = (axis.reshape(-1) for axis in np.indices((rows, columns)))
        image = before + np.stack([np.zeros_like(y), y, x])
        rest = before + max(rows, columns) + np.arange(after)
        return np.concatenate([np.tile(np.arange(before), (3, 1)), image, np.tile(rest, (3, 1))], 1)


def _resized(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Multiples of `unit` whose area lies within the limits, in pixels."""
    sides = [round(side / unit) * unit for side in (height, width)]
    if sides[0] * sides[1] > most:
        scale = math.sqrt(height * width / most)
        sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (height, width)]
    elif sides[0] * sides[1] < least:
        scale = math.sqrt(least / (height * width))
        sides = [math.ceil(side * scale / unit) * unit for side in (height, width)]
    return sides[0], sides[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of paddle-vl export")
    parser.add_argument("image", type=Path, metavar="IMAGE")
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    options = parser.parse_args()
    model = ServedModel(options.folder)
    ids = list(model.answer(options.image, options.question, options.max_new_tokens))
    print(model.tokenizer.decode(ids).strip())


if __name__ == "__main__":
    main()
