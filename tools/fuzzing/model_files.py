"""Model configurations: HF's config.json and the files next to it, and pi07's."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

from fuzzing.mutations import as_json, json_bytes
from fuzzing.parser import Files, Parser
from fuzzing.samples import small_processor
from paddle_vl.families.pi07.config import PLANNER_TYPE, PI07Config, PI07PlannerConfig
from paddle_vl.families.qwen3_vl.inputs.conversation import parse_record
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.generation.config import GenerationConfig

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def _one(name: str, seeds: list[Any], most: int = 2) -> st.SearchStrategy[Files]:
    return json_bytes(seeds, most).map(lambda content: {name: content})


def hf_config(folder: Path) -> Parser:
    """config.json of a Qwen3-VL, dense and with experts, in both dialects; read and written
    back."""
    from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
    from paddle_vl.families.qwen3_vl.sizes import size_values

    sizes = [size_values(name) for name in ("qwen3-vl-2b", "qwen3-vl-8b", "qwen3-vl-30b-a3b")]
    seeds = sizes + [_as_transformers_5(values) for values in sizes]
    file = folder / "config.json"
    file.write_bytes(as_json(seeds[0]))

    def parse() -> None:
        config = Qwen3VLConfig.from_pretrained(folder)
        config.save_pretrained(folder / "again")
        if Qwen3VLConfig.from_pretrained(folder / "again") != config:
            raise AssertionError("a configuration written back is another")

    (folder / "again").mkdir()
    return Parser(_one(file.name, seeds), parse, ("config.json",))


def _as_transformers_5(values: dict[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(values)
    text = values["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
    return values


def generation_config(folder: Path) -> Parser:
    """generation_config.json."""
    seeds = [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "pad_token_id": 5,
         "repetition_penalty": 1.0, "eos_token_id": [1, 2], "bos_token_id": 5,
         "transformers_version": "4.57.0"},
        {"max_new_tokens": 16, "min_new_tokens": 1, "eos_token_id": 3, "num_beams": 1, "seed": 0},
    ]  # fmt: skip
    file = folder / "generation_config.json"
    file.write_bytes(as_json(seeds[0]))

    def parse() -> None:
        config = GenerationConfig.from_pretrained(folder)
        try:
            config.check_vocabulary(100)
        except ValueError:
            return
        config.save_pretrained(folder)
        if GenerationConfig.from_pretrained(folder) != config:
            raise AssertionError("settings written back are others")

    return Parser(_one(file.name, seeds), parse, (file.name,))


def preprocessor(folder: Path) -> Parser:
    """Files of a processor, used on a small image and a small video."""
    small_processor().save_pretrained(folder)
    names = ["preprocessor_config.json", "video_preprocessor_config.json"]
    values = {name: yaml.safe_load((folder / name).read_text()) for name in names}
    plain = {
        "size": {"shortest_edge": 64, "longest_edge": 256}, "patch_size": 4, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "resample": 3, "rescale_factor": 1 / 255, "image_processor_type": "Qwen2VLImageProcessor",
    }  # fmt: skip
    seeds = {
        names[0]: [values[names[0]], plain],
        names[1]: [values[names[1]]],
        "tokenizer_config.json": [{"chat_template": "a", "bos_token": None}],
        "chat_template.json": [{"chat_template": "a"}],
    }
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    user = {"role": "user", "content": "<image><video>What?"}
    record = {"messages": [user, {"role": "assistant", "content": "A cat."}]}
    conversation = parse_record(record | {"images": [image], "videos": [np.stack([image] * 4)]})

    def parse() -> None:
        processor = Qwen3VLProcessor.from_pretrained(folder)
        processor.encode_sample(conversation)

    # The section of transformers 5's nested file is the same.
    nested = {"image_processor": plain, "video_processor": values[names[1]]}
    inputs = [_one(name, known) for name, known in seeds.items()]
    inputs += [
        _one("processor_config.json", [nested]).map(
            lambda files: files | {names[1]: b"{"} if files else files
        ),
        inputs[0],
        inputs[1],
    ]
    # An image that does not fit a processor is reported with the sample's place, not with the file.
    return Parser(st.one_of(inputs), parse)


def pi07_config(folder: Path) -> Parser:
    """config.json of a policy or a planner; read and written back."""
    run = yaml.safe_load((_CONFIGS / "pi07" / "tiny_cpu.yaml").read_text())
    policy = run["model"]["config"]
    policy["dataset_names"] = ["arm::joint", "arm::ee"]
    policy["dataset_to_norm_index"] = {"a": 0, "b": 1}
    whole = PI07Config.from_dict(policy).to_dict()
    planner = PI07PlannerConfig().to_dict()
    file = folder / "config.json"
    file.write_bytes(as_json(policy))

    def parse() -> None:
        # A file without a readable type is read as a policy's.
        is_planner = PLANNER_TYPE.encode() in file.read_bytes()
        kind = PI07PlannerConfig if is_planner else PI07Config
        config = kind.from_pretrained(folder)
        config.save_pretrained(folder / "again")
        if kind.from_pretrained(folder / "again") != config:
            raise AssertionError("a configuration written back is another")

    (folder / "again").mkdir()
    return Parser(_one(file.name, [policy, whole, planner]), parse, ("config.json",))
