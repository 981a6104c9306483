"""`paddle-vl evaluate`, `generate` and `merge`; and how a command sets the runtime up."""

import argparse
import gc
import logging
import os
from pathlib import Path
from typing import Any

from paddle_vl.cli.rollout import OPTIONS, evaluate_in_simulator
from paddle_vl.cli.table import (
    BASE,
    TEMPLATE,
    Command,
    grouped,
    model,
    number,
    output,
    refuse_given,
    switch,
    value,
)
from paddle_vl.parallel.launcher import without_thread_warning

logger = logging.getLogger(__name__)
MEDIA_KINDS = {"image": "a picture", "video": "a video file"}


def evaluate(options: argparse.Namespace) -> int:
    """Print losses and, for models that answer, exact answers; or a policy's successes."""
    if options.env is None:
        refuse_given(options, OPTIONS, "without --env no policy acts")
    else:
        refuse_given(options, _DATA_OPTIONS, "--env takes no data")
    if options.suite is not None:
        refuse_given(options, _OPTIONS_OF_FILES, f"the description {options.suite} says it")
    if options.endpoint is None:
        refuse_given(options, [_KEY], "without --endpoint no server is asked")
    elif options.suite is None:
        raise ValueError("--endpoint is asked a benchmark: give --suite")
    else:
        refuse_given(options, [BASE], "the model at --endpoint is served with what it needs")
    configure_runtime()
    from paddle_vl.families.base import EvaluationOptions
    from paddle_vl.train.evaluate import mean_losses
    from paddle_vl.train.step import ModelRunner

    if options.env is not None:
        return evaluate_in_simulator(options, model_folder_of(options.model))
    settings = EvaluationOptions(
        options.data or [],
        options.batch_size,
        max_length=options.max_length,
        max_new_tokens=options.max_new_tokens,
        limit=options.limit,
        base=options.base,
        chat_template_kwargs=options.chat_template_kwargs,
        show=options.show,
        predictions=None if options.predictions is None else Path(options.predictions),
        metrics=options.metrics,
        suite=options.suite,
        json=None if options.json is None else Path(options.json),
    )
    if options.endpoint is not None:
        from paddle_vl.files.token_file import read_token
        from paddle_vl.serving.endpoint import scores_at

        key = read_token(options.api_key_file, "OPENAI_API_KEY")
        for text in scores_at(options.endpoint, options.model, key, settings):
            print(text)
        return 0
    folder, family = family_of_model(options.model, options.base)
    evaluation = family.ask("evaluate", folder, settings)
    runner = ModelRunner(evaluation.model, evaluation.loss, evaluation.adapter)
    losses = None
    if evaluation.loader is not None:
        with evaluation.loader as batches:
            losses = mean_losses(runner, batches, measure=evaluation.measure)
    for text in evaluation.report(losses):
        print(text)
    return 0


# A benchmark sets them, or has no use for them.
_OPTIONS_OF_FILES = [
    value(
        "--metrics",
        "NAME",
        "score answers with these (anls, multiple_choice, box and others, "
        "or file.py:function) in place of exact answers; see docs/evaluation.md",
        nargs="+",
        default=[],
    ),
    number("--max-new-tokens", "longest answer, in tokens (default 64)", 64),
    number("--max-length", "longest sample, in tokens (default 2048)", 2048),
]
_KEY = value(
    "--api-key-file", "FILE", "file of the token of --endpoint (default: the variable "
    "OPENAI_API_KEY, or no token)",
)  # fmt: skip
_DATA_OPTIONS = [
    value(
        "--endpoint", "URL", "ask the benchmark at a server with OpenAI's interface, such as "
        "http://127.0.0.1:8000/v1 of paddle-vl serve, vLLM or SGLang; --model is the name there",
    ),
    _KEY,
    BASE,
    TEMPLATE,
    value("--data", "FILE", "files of conversations, as data.train takes them", nargs="+"),
    value("--suite", "FILE", "a benchmark, described in YAML like those of configs/suites"),
    *_OPTIONS_OF_FILES,
    number("--batch-size", "samples, or requests, at once (default 8)", 8),
    number("--limit", "use the first N samples (default: all)"),
    number("--show", "print N answers, evenly chosen from the data"),
    value(
        "--predictions", "OUT.jsonl",
        "write one line per answer: sample, task, prompt, expected, answer, is_exact, images; "
        "paddle-vl report shows RUN/predictions.jsonl",
    ),
    value("--json", "OUT.json", "write the scores, and all settings beside them"),
]  # fmt: skip
EVALUATE = Command(
    evaluate,
    "loss and exact answers of a model on a data file; of a policy its losses or successes",
    "Print the mean loss over the answers' tokens, and how many greedy answers equal the expected "
    "ones, for every value of the records' field `task`. Every assistant turn is one answer, given "
    "the data's turns before it; reasoning in front of it is not compared. For a robot policy, "
    "print its losses on demonstrations and the errors of its actions, in their own units; the "
    "options about answers are refused. With --env the policy acts in a simulator, and its "
    "successes are counted.",
    "examples:\n  paddle-vl evaluate --model runs/digits --data data/test.jsonl "
    "--predictions answers.jsonl\n"
    "  paddle-vl evaluate --model runs/reach --env metaworld --task reach-v3 --output episodes",
    [model(), *_DATA_OPTIONS, *OPTIONS],
    folders=("model",),
    one_of=("--data", "--suite", "--env"),
)  # fmt: skip


def generate(options: argparse.Namespace) -> int:
    """Print one answer."""
    settings = generation_settings(options)
    if (options.prompt is None) == (options.task is None):
        raise ValueError("there is one question: give either --prompt or --task")
    configure_runtime()
    folder, family = family_of_model(options.model, options.base)
    chat = family.ask("chat", folder, options.base, options.chat_template_kwargs)
    prompt = options.prompt
    if prompt is None:
        prompt = chat.processor.task_prompt(options.task)
    if not any(f"<{kind}>" in prompt for kind in MEDIA_KINDS):
        prompt = "".join(f"<{kind}>" for kind, _ in options.media) + prompt
    message = {"role": "user", "content": prompt}
    images, videos = ([file for own, file in options.media if own == kind] for kind in MEDIA_KINDS)
    pieces = chat.stream([message], images, videos, **settings)
    for piece in ["".join(pieces)] if options.no_stream else pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def generation_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The given options, under the names of `GenerationConfig`, which has checked them."""
    from paddle_vl.generation.config import GenerationConfig

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
    settings = {name: getattr(options, name) for name in names}
    settings = {name: value for name, value in settings.items() if value is not None}
    is_cold = settings.get("temperature") == 0
    if is_cold:
        del settings["temperature"]
    drawing = sorted(settings.keys() & {"temperature", "top_k", "top_p"})
    is_greedy = options.greedy or is_cold
    if drawing and is_greedy:
        raise ValueError(
            f"{'--greedy' if options.greedy else '--temperature 0'} does not sample, so "
            f"{drawing[0]} has no effect: give only one of them"
        )
    if drawing or is_greedy:
        settings["do_sample"] = not is_greedy
    GenerationConfig().updated(**settings)
    return settings


DECODING = grouped(
    "decoding",
    value("--max-new-tokens", "N", "longest answer, in tokens (without a file 128)", type=int),
    value("--temperature", "T",
          "divides the logits; below 1 favours likely tokens, 0 takes them", type=float),
    value("--top-k", "K", "sample from the K most likely tokens; 0 for all", type=int),
    value("--top-p", "P", "sample from the likeliest tokens of total probability P", type=float),
    value("--repetition-penalty", "R", "above 1 makes repeated tokens less likely", type=float),
    value("--seed", "N", "seed of sampling", type=int),
    switch("--greedy", "always take the most likely token"),
)  # fmt: skip
DECODING_TEXT = {"decoding": "--temperature, --top-k or --top-p turns on sampling."}
GENERATE = Command(
    generate,
    "ask a model about images and videos",
    "Print a model's answer to one question about any number of images and videos, token by token. "
    "Options that are not given come from the model's generation_config.json; without one, "
    "decoding is greedy.",
    "example:\n  paddle-vl generate --model runs/digits --image a.png --image b.png "
    '--prompt "Which digit is larger?"',
    [
        model(),
        BASE,
        TEMPLATE,
        *(
            value(
                f"--{kind}", "FILE",
                f"{name}; repeat it for several, in the order of the <{kind}> tags of the prompt; "
                "for a prompt without tags all images and videos come first, in the order given",
                # One list for both kinds keeps their order.
                dest="media", type=lambda file, kind=kind: (kind, file), action="append",
                default=[],
            )
            for kind, name in MEDIA_KINDS.items()
        ),
        value("--prompt", "TEXT", "the question"),
        value(
            "--task", "NAME",
            "in place of --prompt, the question of a task; PaddleOCR-VL's are text, table, "
            "formula, chart, spotting and seal",
        ),
        switch("--no-stream", "print the answer when it is complete"),
        *DECODING,
    ],
    DECODING_TEXT,
    folders=("model",),
)  # fmt: skip


def merge(options: argparse.Namespace) -> int:
    """Write the merged model with its processor files."""
    configure_runtime()
    from paddle_vl.checkpoint.adapter_files import is_adapter

    folder, family = family_of_model(options.model, options.base)
    out = Path(options.output)
    if not is_adapter(folder):
        raise ValueError(f"{folder} is a full model, not an adapter: there is nothing to merge")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: merge into a new folder")
    base = family.ask("merge", folder, out, options.base)
    print(f"{folder} and {base} are one model in {out}")
    return 0


MERGE = Command(
    merge,
    "merge adapters into their base model",
    "Add LoRA adapters to the weights of their base model and write the result as a model folder "
    "in HF's layout, a tensor at a time.",
    "example:\n  paddle-vl merge --model runs/doors --output models/doors",
    [
        model("a folder of adapters in PEFT's format, or the output_dir of a run with model.lora"),
        output("the new model folder"),
        BASE,
    ],
    folders=("model", "output"),
)


def model_folder_of(name: str) -> Path:
    """The folder of a model or of adapters that a command names."""
    from paddle_vl.files.hub import path_or_download
    from paddle_vl.train.checkpoint import model_folder

    return model_folder(path_or_download(name))


def family_of_model(name: str, base: str | None) -> tuple[Path, Any]:
    """The folder of a model or of adapters, and its family."""
    from paddle_vl.checkpoint.adapter_files import folder_with
    from paddle_vl.config.families import family_of_folder

    folder = model_folder_of(name)
    return folder, family_of_folder(folder_with("config.json", folder, base))


def configure_runtime() -> None:
    """Configure the CPU runtime, all cores unless OMP_NUM_THREADS is set, with compiled kernels; or
    that of a GPU.

    Must run before Paddle is imported, which sets that variable to one thread.
    """
    is_chosen = "OMP_NUM_THREADS" in os.environ or int(os.environ.get("PADDLE_TRAINERS_NUM", 1)) > 1
    num_threads = None if is_chosen else len(os.sched_getaffinity(0))

    # What imports make lives as long as the process: not searched for garbage, now or later.
    gc.disable()
    with without_thread_warning():
        from paddle_vl.compat import configure_cpu_runtime
    gc.freeze()
    gc.enable()

    if configure_cpu_runtime(num_threads):
        from paddle_vl.nn.cpu import compiled

        compiled.enable()
    else:
        from paddle_vl.train.gpu_settings import configure_gpu

        configure_gpu()


def configure_training_runtime() -> None:
    """`configure_runtime`, and on a GPU the allocator's flags, which are logged."""
    configure_runtime()
    import paddle

    from paddle_vl.train.allocator import configure_allocator

    if not paddle.get_device().startswith("cpu"):
        logger.info("%s", configure_allocator())


def with_data_parallel(options: argparse.Namespace, config: Any) -> Any:
    """The settings with data parallelism over the ranks of --nproc, if no degree is set."""
    from paddle_vl.config.load import load_run_config

    degrees = [f"{axis}_degree" for axis in ("dp", "mp", "pp", "sharding")]
    given = {override.partition("=")[0] for override in options.overrides}
    is_set = any(getattr(config.parallel, name) > 1 for name in degrees)
    if options.nproc == 1 or is_set or given & {f"parallel.{name}" for name in degrees}:
        return config
    setting = f"parallel.dp_degree={options.nproc}"
    logger.info(
        "--nproc %d and no degree of parallel is set: data parallel, %s, so a step takes %d times "
        "the samples",
        options.nproc,
        setting,
        options.nproc,
    )
    options.overrides.append(setting)
    return load_run_config(options.config, options.overrides)
