"""The steps of the benchmarks in their references on torch, each as a line of JSON.

    PYTHON tools/benchmarks/references.py hf CONFIG STEPS THREADS [--tokens N]
    PYTHON tools/benchmarks/references.py opentau CONFIG PROCESSOR STEPS THREADS
    PYTHON tools/benchmarks/references.py trl FOLDER STEPS THREADS

`step.py`, `answers.py` and `rewards.py` run it with `--against PYTHON`, an interpreter that has
torch, PyYAML and transformers (sdpa), opentau or trl; nothing of paddle_vl is imported. With
`--tokens` HF answers prompts. OpenTau casts to bfloat16 by a function of each of its modules, which
float32 takes the place of here; its tokenizer of the Hub is replaced by the made-up data's own, so
that the texts have the same lengths.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

FIRST_PAD, WARM_UP = 11, 2
# Numbers of prompts that are answered at once, and answers that are timed, the first to warm up.
PROMPTS, RUNS = (1, 8), 4
IDS = {"image_token_id": 2040, "vision_start_token_id": 2041, "vision_end_token_id": 2042,
       "video_token_id": 2043}  # fmt: skip
# Beginnings of HF's classes by the `model_type` of a configuration file.
CLASSES = {"qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5", "qwen4_exp": "Qwen4Exp",
           "paddleocr_vl": "PaddleOCRVL"}  # fmt: skip


def samples(config: Any, settings: dict[str, Any], size: int) -> dict[str, np.ndarray]:
    """Inputs of so many samples of one image each, with random text behind the image."""
    vision, data = config.vision_config, settings["data"]
    side = int(data["max_pixels"] ** 0.5) // vision.patch_size
    pads = (side // vision.spatial_merge_size) ** 2
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, (size, data["max_length"]))
    ids[:, FIRST_PAD - 1] = config.vision_start_token_id
    ids[:, FIRST_PAD : FIRST_PAD + pads] = config.image_token_id
    ids[:, FIRST_PAD + pads] = config.vision_end_token_id
    if hasattr(vision, "in_channels"):
        patch = [vision.in_channels * vision.temporal_patch_size * vision.patch_size**2]
    else:  # PaddleOCR-VL's patches are pictures.
        patch = [vision.num_channels, vision.patch_size, vision.patch_size]
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "pixel_values": rng.standard_normal((size * side**2, *patch), np.float32),
        "image_grid_thw": np.array([[1, side, side]] * size),
    }


def answer_seconds(model: Any, settings: dict[str, Any], tokens: int) -> dict[str, float]:
    """Processor time to the first token and per further token, of one prompt and of several."""
    import torch  # pyright: ignore[reportMissingImports]

    model.eval()
    model.generation_config.eos_token_id = None
    found: dict[str, float] = {}
    for size in PROMPTS:
        given = {k: torch.tensor(v) for k, v in samples(model.config, settings, size).items()}
        given["mm_token_type_ids"] = (given["input_ids"] == model.config.image_token_id).int()
        runs = []
        for _ in range(RUNS):
            times = [time.process_time()]

            def goes_on(ids: Any, scores: Any, times: list[float] = times) -> Any:
                times.append(time.process_time())
                return torch.zeros(len(ids), dtype=torch.bool)

            model.generate(
                **given, max_new_tokens=tokens, do_sample=False, stopping_criteria=[goes_on]
            )
            runs.append(times)
        found |= least_of(runs, size)
    return found


def least_of(runs: Sequence[Sequence[float]], size: int) -> dict[str, float]:
    """Least times to the first token and per further one, of clocks at the start and behind every
    token of answers to `size` prompts; the first answer warms up."""
    found = [(each[1] - each[0], (each[-1] - each[1]) / (len(each) - 2)) for each in runs[1:]]
    first, further = map(min, zip(*found, strict=True))
    return {f"first of {size}": first, f"next of {size}": further}


def step_seconds(model: Any, settings: dict[str, Any], steps: int) -> dict[str, float]:
    """Median of the training steps on one batch, and processor time per step."""
    import torch  # pyright: ignore[reportMissingImports]

    train = settings["train"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train["learning_rate"], weight_decay=train["weight_decay"]
    )
    size = train["per_device_train_batch_size"]
    made = samples(model.config, settings, size)
    batch = {name: torch.tensor(value) for name, value in made.items()}
    is_image = batch["input_ids"] == model.config.image_token_id
    batch["mm_token_type_ids"] = is_image.int()
    # The prompt ends with its image.
    behind = is_image.int().cumsum(-1) == is_image.sum(-1, keepdim=True)
    is_answer = behind & ~is_image & (batch["input_ids"] != model.config.vision_end_token_id)
    batch["labels"] = batch["input_ids"].masked_fill(~is_answer, -100)
    times, begin_cpu = [], 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            begin_cpu = time.process_time()
        begin = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    cpu = (time.process_time() - begin_cpu) / steps
    return {"step": statistics.median(times[WARM_UP:]), "cpu": cpu}


def of_hf(options: argparse.Namespace) -> dict[str, Any]:
    """The step, or answers, of a vision-language model of transformers."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import yaml

    settings = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))
    values = settings["model"]["config"]
    kind = CLASSES[values.get("model_type", "qwen3_vl")]
    config = getattr(transformers, f"{kind}Config")(**values | IDS)
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    model = model_class._from_config(config, attn_implementation="sdpa").float()
    measure, count = answer_seconds, options.tokens
    if not count:
        measure, count = step_seconds, options.steps
    seconds = measure(model, settings, count)
    versions = {each.__name__: each.__version__ for each in (torch, transformers)}
    return {"seconds": seconds, "versions": versions}


def policy_model(settings: dict[str, Any], processor: str) -> Any:
    """OpenTau's flow-matching model of a run file's `model.config`, in float32."""
    import torch  # pyright: ignore[reportMissingImports]
    from opentau.configs.types import FeatureType, PolicyFeature  # pyright: ignore
    from opentau.policies.pi07 import gemma3_with_expert  # pyright: ignore
    from opentau.policies.pi07.low_level import modeling_pi07_low_level as low_level  # pyright: ignore
    from opentau.policies.pi07.low_level.configuration_pi07_low_level import (  # pyright: ignore
        PI07LowLevelConfig,
    )
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    class Tokenizers:
        @staticmethod
        def from_pretrained(_: str) -> Any:
            return PreTrainedTokenizerFast(tokenizer_file=f"{processor}/tokenizer.json")

    for module in (gemma3_with_expert, low_level):
        module._preferred_dtype = lambda: torch.float32
    low_level.AutoTokenizer = Tokenizers
    given = dict(settings["model"]["config"])
    given.pop("type")
    for name in ("input_features", "output_features"):
        given[name] = {
            key: PolicyFeature(FeatureType[value["type"]], tuple(value["shape"]))
            for key, value in given[name].items()
        }
    parts = given.pop("vlm_config")
    vision = dict(parts["gemma3_config"]["vision_config"])
    vision |= {"vision_use_head": False, "model_type": "siglip_vision_model"}
    gemma3 = parts["gemma3_config"] | {"vision_config": vision}
    expert = parts["gemma_expert_config"] | {"use_adarms": True}
    given["vlm_config"] = gemma3_with_expert.Gemma3WithExpertConfig(
        gemma3,
        expert | {"vocab_size": 8},  # It reads no tokens.
        freeze_vision_encoder=given["freeze_vision_encoder"],
        train_expert_only=False,
        attention_implementation=given["attention_implementation"],
        dropout=given["dropout"],
        disable_internal_bf16_cast=True,
    )
    config, vocab_size = PI07LowLevelConfig(**given), parts["discrete_action_vocab_size"]
    return low_level.PI07LowLevelFlowMatching(config, vocab_size).float().train()


def batch_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Random inputs with the shapes of the run file, every optional part present."""
    import torch  # pyright: ignore[reportMissingImports]

    given, size = settings["model"]["config"], settings["train"]["per_device_train_batch_size"]
    cameras = sum(value["type"] == "VISUAL" for value in given["input_features"].values())
    height, width = given["resize_imgs_with_padding"]
    frames, chunk = given["n_obs_steps"], given["chunk_size"]

    def tokens(length: int, vocabulary: int = 300) -> torch.Tensor:
        return torch.randint(0, vocabulary, (size, length))

    def mask(*shape: int) -> torch.Tensor:
        return torch.ones(size, *shape, dtype=torch.bool)

    texts = {"lang": "prompt_max_length", "response": "response_max_length",
             "metadata": "metadata_max_length"}  # fmt: skip
    batch = {}
    for name, field in texts.items():
        batch[f"{name}_tokens"], batch[f"{name}_masks"] = tokens(given[field]), mask(given[field])
    length = given["discrete_action_max_length"]
    vocabulary = given["vlm_config"]["discrete_action_vocab_size"]
    return batch | {
        "videos": [torch.randn(size, frames, 3, height, width) for _ in range(cameras)],
        "vid_masks": [mask() for _ in range(cameras)],
        "subgoal_images": [torch.randn(size, 3, height, width) for _ in range(cameras)],
        "subgoal_img_masks": [mask() for _ in range(cameras)],
        "state": torch.randn(size, frames, given["max_state_dim"]),
        "actions": torch.randn(size, chunk, given["max_action_dim"]),
        "actions_is_pad": ~mask(chunk),
        "obs_history_is_pad": ~mask(frames),
        "discrete_actions": tokens(length, vocabulary),
        "discrete_action_masks": mask(length),
    }


def of_opentau(options: argparse.Namespace) -> dict[str, Any]:
    """The step of OpenTau's policy."""
    from importlib.metadata import version

    import torch  # pyright: ignore[reportMissingImports]
    import yaml

    settings = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))
    model, batch = policy_model(settings, options.processor), batch_of(settings)
    # Fresh weights project images to zero, and the gradient of a norm of zero overflows.
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, std=0.02)
    train = settings["train"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=train["learning_rate"], weight_decay=train["weight_decay"]
    )
    times: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "step": []}
    for _ in range(WARM_UP + options.steps):
        marks = [time.perf_counter()]
        losses = model(**batch)
        marks.append(time.perf_counter())
        (losses["MSE"] + losses["CE"]).backward()
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        for name, begin, end in zip(times, marks, marks[1:], strict=False):
            times[name].append(end - begin)
        times["step"].append(marks[-1] - marks[0])
    return {
        "seconds": {name: statistics.median(values[WARM_UP:]) for name, values in times.items()},
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "versions": {"torch": torch.__version__, "opentau": version("opentau")},
    }


def update_speed(clocks: Sequence[tuple[float, float]], counts: Path) -> dict[str, float]:
    """Medians over updates, without those that warm up, of sampled tokens per second.

    Args:
        clocks: processor time and time at the start and behind every update.
        counts: file with a line of sampled tokens for each update.
    """
    tokens = [int(line) for line in counts.read_text().split()]
    rates = [
        [count / (end - begin) for begin, end in zip(*pair, strict=True)]
        for count, pair in zip(tokens, pairwise(clocks), strict=True)
    ][WARM_UP:]
    cpu, clock = map(statistics.median, zip(*rates, strict=True))
    return {"cpu": cpu, "clock": clock, "tokens": statistics.median(tokens[WARM_UP:])}


def vision_processor(folder: Path) -> Any:
    """HF's processor of a folder, without torchvision, which videos alone would need."""
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoTokenizer,
        Qwen2VLImageProcessorPil,
        Qwen3VLProcessor,
    )

    class Processor(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """No video processor is fine."""

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Processor(images, tokenizer, None, chat_template=template)


def of_trl(options: argparse.Namespace) -> dict[str, Any]:
    """Updates of TRL's GRPOTrainer on the folder that `rewards.py` has written."""
    import runpy

    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from PIL import Image

    folder = Path(options.folder)
    given = json.loads((folder / "settings.json").read_text())
    counts = folder / "counts.txt"
    counts.unlink(missing_ok=True)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    prompts = []
    for row in rows:
        text = row["messages"][0]["content"].removeprefix("<image>")
        images = [Image.open(name).convert("RGB") for name in row["images"]]
        prompts.append({"prompt": [{"role": "user", "content": text}], "images": images})
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        folder / "model", attn_implementation="sdpa", dtype=torch.float32
    )
    clocks: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not clocks:
                self.on_step_end()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clocks.append((time.process_time(), time.perf_counter()))

    config = trl.GRPOConfig(
        output_dir=str(folder / "out_trl"),
        max_steps=WARM_UP + options.steps,
        per_device_train_batch_size=given["rows"],
        num_generations=given["num_generations"],
        max_completion_length=given["max_completion_length"],
        learning_rate=given["learning_rate"],
        weight_decay=given["weight_decay"],
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=runpy.run_path(str(folder / "reward.py"))["odd_share"],
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=vision_processor(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    versions = {each.__name__: each.__version__ for each in (torch, transformers, trl)}
    return {**update_speed(clocks, counts), "versions": versions}


# Functions of the references, and their arguments.
REFERENCES = {
    "hf": (of_hf, {"config": str, "steps": int, "threads": int}),
    "opentau": (of_opentau, {"config": str, "processor": str, "steps": int, "threads": int}),
    "trl": (of_trl, {"folder": str, "steps": int, "threads": int}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="reference", required=True)
    for name, (_, arguments) in REFERENCES.items():
        command = commands.add_parser(name)
        for argument, kind in arguments.items():
            command.add_argument(argument, type=kind)
        command.add_argument("--tokens", type=int, help="of answers, without training")
    options = parser.parse_args()
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(getattr(options, "threads", 1))
    torch.manual_seed(0)
    found = REFERENCES[options.reference][0](options)
    found["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
