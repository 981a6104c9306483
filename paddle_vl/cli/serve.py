"""`paddle-vl serve` and `serve-policy`: a model, or a policy, for clients over the network."""

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

from paddle_vl.cli.commands import configure_runtime, family_of_model, model_folder_of
from paddle_vl.cli.table import (
    BASE,
    MODEL_TEXT,
    TEMPLATE,
    Command,
    Option,
    grouped,
    model,
    natural,
    number,
    port,
    refuse_given,
    seconds,
    switch,
    value,
)
from paddle_vl.threads import end_process

logger = logging.getLogger(__name__)
_SWITCH_S = 0.0005


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal; the process ends there."""
    try:
        import llguidance  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error}: pip install 'paddle-vl[serve]'") from error
    if _is_export(options):
        refuse_given(
            options, [*_OF_MODELS, _PROMPTS], "an export has its own weights and runs whole prompts"
        )
        # It looks for the cores' number, which Paddle changes when it is imported.
        import paddle_vl.export  # noqa: F401
    else:
        configure_runtime()
    import socket

    from paddle_vl.files.token_file import read_token
    from paddle_vl.serving.access import check_exposure
    from paddle_vl.serving.openai_app import AppSettings, OpenAIApp, OpenAIServer

    token = options.api_key or read_token(options.token_file)
    check_exposure(options.host, token, options.allow_anyone)
    settings = AppSettings(
        token, options.max_body_mb << 20, options.max_requests, options.deadline, options.grace
    )
    # From now on clients wait for the model.
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listening:
        served = served_model(options)
        served.engine.start()
        server = OpenAIServer(OpenAIApp(served, settings))
        # The model's thread gives Python's lock away in every operation, and waits this long for it
        # while others compute; the usual 5 ms are many times an operation.
        sys.setswitchinterval(_SWITCH_S)
        host, port = listening.getsockname()[:2]
        logger.info("%s: http://%s:%d/v1", ", ".join(served.names), host, port)
        server.run([listening])
    # A model that still computes must not hold the process.
    end_process(0)
    return 0


def served_model(options: argparse.Namespace) -> Any:
    """The model of the options, with its engine, which is not started yet."""
    from paddle_vl.generation.config import GenerationConfig
    from paddle_vl.serving.engine import Engine, EngineSettings
    from paddle_vl.serving.grammars import Grammars
    from paddle_vl.serving.openai_calls import ServedModel
    from paddle_vl.serving.prompts import MediaRules, Prompts

    longest = None
    if _is_export(options):
        from paddle_vl.export import load

        model = load(options.model)
        if not hasattr(model, "answer"):
            raise ValueError(f"{options.model} holds no conversations: give a model that answers")
        processor, vocab = model.processor, model.vocab_size
    else:
        folder, family = family_of_model(options.model, options.base)
        chat = family.ask("chat", folder, options.base, options.chat_template_kwargs, options.dtype)
        model, processor, text = chat.model, chat.processor, chat.model.config.text_config
        vocab, longest = text.vocab_size, text.max_position_embeddings
    bounds = EngineSettings(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.kv_cache_tokens,
        max_waiting_tokens=options.max_waiting_tokens,
    )
    adapters = {name: model_folder_of(given) for name, given in options.lora_modules}
    engine = Engine(model, bounds, adapters)
    room = int(engine.stats()["kv_blocks_total"]) * bounds.block_size
    length = min(options.max_model_len or room, room, longest or room)
    files, weights = options.allowed_media_path, options.allowed_weights_path
    rules = MediaRules(files and Path(files).resolve(strict=True), options.allow_remote)
    own = model.generation_config or GenerationConfig()
    ends = own.with_ends_of(processor.generation_config).eos_token_ids
    return ServedModel(
        engine,
        Prompts(processor, vocab, length, rules),
        Grammars(processor.tokenizer, vocab, ends),
        options.served_model_name or [options.model],
        [*adapters],
        model.generation_config,
        ends,
        options.default_max_tokens,
        options.logprobs_mode,
        None if weights is None else Path(weights).resolve(strict=True),
    )


def _is_export(options: argparse.Namespace) -> bool:
    return (Path(options.model) / "export.json").is_file()


def serve_policy(options: argparse.Namespace) -> int:
    """Serve until a signal; the process ends there."""
    try:
        import msgpack  # noqa: F401
        import websockets  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error}: pip install 'paddle-vl[serve]'") from error
    import asyncio

    from paddle_vl.config.bounded_yaml import read_document
    from paddle_vl.files.token_file import read_token
    from paddle_vl.serving import openpi, vla_eval
    from paddle_vl.serving.access import check_exposure
    from paddle_vl.serving.batching import BatchSettings
    from paddle_vl.serving.policy import PolicyActor, open_policy
    from paddle_vl.serving.transport import Server, ServerSettings, WireProtocol

    token = read_token(options.token_file)
    check_exposure(options.host, token, options.allow_anyone)
    is_openpi = options.protocol == "openpi"
    if is_openpi and options.chunk_size is not None:
        raise ValueError("--chunk-size is for --protocol vla-eval; openpi's clients cut chunks")
    values = {name: read_document(text, f"--value {name}")[0] for name, text in options.value}
    entries = {"features": dict(options.feature), "ignored": options.ignore, "values": values}
    configure_runtime()
    folder, begin = model_folder_of(options.model), time.monotonic()
    server = Server(
        ServerSettings(
            options.host,
            options.port,
            token,
            options.max_clients,
            options.max_message_mb << 20,
            options.deadline,
            keep_alive=is_openpi,
        ),
        BatchSettings(options.max_batch_size, options.max_wait),
    )

    def load() -> WireProtocol:
        policy = open_policy(folder, options.runtime)
        protocol = openpi if is_openpi else vla_eval
        actor = PolicyActor(policy, protocol.usual_keys, **entries, seed=options.seed)
        if (options.chunk_size or 0) > actor.config.chunk_size:
            raise ValueError(
                f"--chunk-size is {options.chunk_size}, and this policy's chunks have "
                f"{actor.config.chunk_size} actions: give at most these"
            )
        actor.warm_up(sorted({1, options.max_batch_size}))
        if is_openpi:
            return openpi.OpenpiProtocol(actor, openpi.metadata_of(actor))
        return vla_eval.VlaEvalProtocol(actor, vla_eval.hello_of(actor), options.chunk_size)

    def started(port: int) -> None:
        logger.info("%s: ws://%s:%d, loading %s", options.protocol, options.host, port, folder)

    def ready() -> None:
        logger.info("ready after %.1f s", time.monotonic() - begin)

    asyncio.run(server.run(load, started, ready))
    # A model that still loads or computes must not hold the process.
    end_process(0)
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, given = text.partition("=")
    if not (name and equals and given):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=...")
    return name, given


def _network(*limits: Option) -> list[Option]:
    """Options of servers, and limits of their own."""
    return grouped(
        "network",
        value("--host", "HOST", "address to listen at (default 127.0.0.1, this machine only)",
              default="127.0.0.1"),
        value("--port", "N", "port; 0 for any (default 8000)", type=port, default=8000),
        value("--token-file", "FILE", "file of the token that clients must send as `Bearer`, or "
              "`Api-Key` (default: the variable PADDLE_VL_SERVER_TOKEN, or no token)"),
        switch("--allow-anyone", "listen for other machines without a token"),
        *limits,
    )  # fmt: skip


_PROMPTS = number("--max-num-batched-tokens", "tokens of prompts in a step (default 512)", 512)
_OF_MODELS = [
    BASE,
    TEMPLATE,
    Option("--dtype", "of the weights; auto is that of the files (default float32)",
           {"default": "float32", "choices": ("float32", "bfloat16", "auto")}),
    value("--lora-modules", "NAME=DIR", "adapters over the model, by the names that requests have "
          "for them", type=_pair, nargs="+", default=[]),
    value("--allowed-weights-path", "DIR", "clients may have weights and adapters of folders in "
          "this one loaded, as a run that learns from rewards does (default: none)"),
]  # fmt: skip
SERVE = Command(
    serve,
    "answer clients of OpenAI's interface, many at once",
    "Serve a model that answers at /v1/chat/completions, /v1/completions and /v1/models, with "
    "images, videos, tools, reasoning and JSON schemas. Requests join and leave one running batch. "
    "The port also answers GET / with a page to try the model, /health and /metrics. SIGTERM and "
    "SIGINT end it, after what was asked is answered.",
    "examples:\n  paddle-vl serve --model runs/doors --port 8000\n"
    "  paddle-vl serve Qwen/Qwen3-VL-2B-Instruct --lora-modules doors=runs/doors",
    [
        model(f"{MODEL_TEXT}; or a folder of `paddle-vl export`"),
        value("--served-model-name", "NAME", "names that requests have for the model (default: "
              "what --model says)", nargs="+"),
        *_OF_MODELS,
        *_network(
            value("--api-key", "KEY", "the token itself; other users of this machine see it"),
            number("--max-requests", "requests that are open at once; more get 429 (default 256)",
                   256),
            number("--max-body-mb", "longest request, in MiB (default 64)", 64),
            value("--deadline", "SECONDS", "end a request without a complete answer then (default "
                  "600)", type=seconds, default=600.0),
            value("--grace", "SECONDS", "time that answers have to end when the server does "
                  "(default 30)", type=seconds, default=30.0),
        ),
        *grouped(
            "images and videos",
            value("--allowed-media-path", "DIR", "clients may name files in this folder (default: "
                  "none)"),
            switch("--allow-remote", "fetch images and videos from public http(s) addresses"),
        ),
        *grouped(
            "batches",
            number("--max-model-len", "tokens of a prompt with its answer (default: what the model "
                   "and the memory have room for)"),
            Option("--logprobs-mode", "log-probabilities before any rule of sampling, or behind "
                   "temperature, top_k and the like (default raw_logprobs)",
                   {"default": "raw_logprobs", "choices": ("raw_logprobs", "processed_logprobs")}),
            number("--default-max-tokens", "of an answer, where a chat does not say (default 2048)",
                   2048),
            number("--max-num-seqs", "answers that run at once (default 32)", 32),
            _PROMPTS,
            number("--kv-cache-tokens", "tokens with keys and values in memory (default 16384)",
                   16384),
            number("--max-waiting-tokens", "tokens of requests that wait, prompts and answers; "
                   "more get 429 (default 65536)", 1 << 16),
        ),
    ],
    folders=("model",),
)  # fmt: skip
SERVE_POLICY = Command(
    serve_policy,
    "answer the observations of robots and simulators with a policy's actions",
    "Serve a saved policy, or its exported programs, to clients of openpi (openpi-client) or of "
    "vla-eval, over websockets. Requests of several clients run as one batch. The port also "
    "answers GET /healthz, /health, /metrics and /config. SIGTERM and SIGINT end it, after what "
    "was asked is answered.",
    "examples:\n  paddle-vl serve-policy --model runs/arm\n"
    "  paddle-vl serve-policy --model exports/arm --protocol vla-eval --chunk-size 10 "
    "--feature camera0=images/corner2",
    [
        model("a policy's folder, a run's output_dir, or a folder of `paddle-vl export`"),
        Option(
            "--protocol",
            "of the clients (default openpi)",
            {"default": "openpi", "choices": ("openpi", "vla-eval")},
        ),
        Option(
            "--runtime",
            "that runs an export folder: onnxruntime takes its programs in ONNX (default paddle)",
            {"default": "paddle", "choices": ("paddle", "onnxruntime")},
        ),
        number("--chunk-size", "vla-eval: use the first N actions of a chunk, one an observation "
               "(default: send whole chunks)"),
        value("--seed", "N", "seed of the noise (default 0)", type=natural, default=0),
        *grouped(
            "observations",
            value("--feature", "NAME=KEY", "the clients' key of an entry of the policy; repeat it "
                  "for several", type=_pair, action="append", default=[]),
            value("--ignore", "KEY", "a key of the clients that is left out; repeat it for several",
                  action="append", default=[]),
            value("--value", "NAME=VALUE", "an entry that observations get if they have none, such "
                  "as quality=5; repeat it for several", type=_pair, action="append", default=[]),
        ),
        *_network(
            number("--max-clients", "most connections (default 64)", 64),
            number("--max-message-mb", "longest observation, in MiB (default 16)", 16),
        ),
        *grouped(
            "batches",
            number("--max-batch-size", "most requests of a batch (default 8)", 8),
            value("--max-wait", "SECONDS", "after a batch, wait so long for the next one to fill "
                  "(default 0)", type=seconds, default=0.0),
            value("--deadline", "SECONDS", "refuse what has no answer by then (default 25; clients "
                  "of vla-eval wait 30)", type=seconds, default=25.0),
        ),
    ],
    folders=("model",),
)  # fmt: skip
