"""The step of `step.py --family pi07` in OpenTau on torch (sdpa).

    PYTHON tools/benchmarks/step_opentau.py CONFIG PROCESSOR STEPS THREADS   prints one line of JSON

`step.py --family pi07 --against PYTHON` runs it with an interpreter that has torch, opentau and
PyYAML; it imports nothing of paddle_vl. OpenTau casts to bfloat16 by a function of each of its
modules, which float32 takes the place of here; its tokenizer of the Hub is replaced by the made-up
data's own, so that the texts have the same lengths.
"""

import argparse
import json
import resource
import statistics
import time
from typing import Any

WARM_UP = 2


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="configs/bench/pi07_step.yaml")
    parser.add_argument("processor", metavar="PROCESSOR", help="folder with tokenizer.json")
    parser.add_argument("steps", metavar="STEPS", type=int)
    parser.add_argument("threads", metavar="THREADS", type=int)
    options = parser.parse_args()
    # Imported here, so that --help needs neither.
    from importlib.metadata import version

    import torch  # pyright: ignore[reportMissingImports]
    import yaml

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with open(options.config, encoding="utf-8") as file:
        settings = yaml.safe_load(file)
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
    found = {
        "seconds": {name: statistics.median(values[WARM_UP:]) for name, values in times.items()},
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {"torch": torch.__version__, "opentau": version("opentau")},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
