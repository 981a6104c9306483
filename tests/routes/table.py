"""What README and docs promise of the command line, as data: a row for each command, family and
capability, which the tests beside this file run and docs/testing.md shows.

A training row is a run of `RUNS` under a topology of `TOPOLOGIES`: its losses and saved weights are
those of the same run on one device. With `then` another topology (or the same: then to the bit)
continues the checkpoint of step 2. Settings are those of the configurations in `configs/`, but for
a few steps and an optimizer that does not amplify rounding.
"""

from collections.abc import Iterator
from typing import NamedTuple

SP = ("parallel.sequence_parallel=true", "data.pad_to_multiple_of=2")
_SHARDING = "parallel.sharding_degree=2"
_CP = (_SHARDING, "parallel.cp_degree=2", "data.pad_to_multiple_of=2")
_STAGE = "parallel.sharding_stage="
_PP, _MP, _DP = "parallel.pp_degree=2", "parallel.mp_degree=2", "parallel.dp_degree=2"
_ULYSSES, _COLOCATED = "parallel.cp_attention=ulysses", "parallel.schedule=colocated"
_EP = "parallel.ep_degree=2"
# The same samples in twice as many micro-batches, for the schedules that want them.
HALVES = "halves"

# Settings by name; the number of ranks is the product of the degrees.
TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "1 rank": (),
    "dp2": (_DP,),
    "mp2": (_MP,),
    "mp2 SP": (_MP, *SP),
    "pp2": (_PP,),
    "pp2 by cost": (_PP, "parallel.pp_split=cost", "parallel.pp_shapes=dynamic"),
    "sharding2 stage 1": (_SHARDING,),
    "sharding2 stage 2": (_SHARDING, f"{_STAGE}2"),
    "sharding2 stage 3": (_SHARDING, f"{_STAGE}3"),
    "cp2 gather": _CP,
    "cp2 gather stage 3": (*_CP, f"{_STAGE}3", "parallel.cp_gather_overlap=true"),
    "cp2 ulysses": (*_CP, _ULYSSES),
    "cp2 ulysses stage 3": (*_CP, _ULYSSES, f"{_STAGE}3"),
    "colocated pp2": (_PP, _COLOCATED),
    "colocated pp2, divided tower": (_PP, _COLOCATED, "parallel.encoder.mp_degree=2"),
    "ep2 sharding2": (_EP, _SHARDING),
    "ep2 sharding2 stage 3": (_EP, _SHARDING, f"{_STAGE}3"),
    "ep2 dp2": (_EP, _DP),
    "ep2 mp2 SP": (_EP, _MP, *SP),
    "ep2 capacity": (_EP, _SHARDING, "parallel.expert_capacity_factor=1.5"),
    "ep2 cp2 gather": (_EP, *_CP),
    "ep2 cp2 ulysses": (_EP, *_CP, _ULYSSES),
    "dp2 mp2 SP": (_DP, _MP, *SP),
    "mp2 SP pp2": (_MP, *SP, _PP),
    "sharding2 stage 3 mp2 SP": (_SHARDING, f"{_STAGE}3", _MP, *SP),
    "sharding2 pp2": (_SHARDING, _PP),
    "dp2 sharding2 stage 2": (_DP, _SHARDING, f"{_STAGE}2"),
    "cp2 gather mp2 SP": (*_CP[:2], _MP, SP[0], "data.pad_to_multiple_of=4"),
    "cp2 ulysses mp2 SP": (*_CP[:2], _ULYSSES, _MP, SP[0], "data.pad_to_multiple_of=4"),
    "cp2 gather pp2": (*_CP, _PP),
    "cp2 ulysses pp2": (*_CP, _ULYSSES, _PP),
    "pp2 dualpipev": (_PP, "parallel.pp_schedule=dualpipev", HALVES),
    "colocated dp2 pp2": (_DP, _PP, _COLOCATED, "parallel.encoder.mp_degree=2"),
}


class Run(NamedTuple):
    """A training that has a run on one device and rows under topologies.

    Attributes:
        family: as README names it.
        what: the capability.
        config: file in `configs/`.
        settings: further ones; `{NAME}` is the folder of what another run trained, `{data}` that of
            data files.
        micro_batch: samples or rows in a micro-batch of all data ranks; a step has two.
    """

    family: str
    what: str
    config: str
    settings: tuple[str, ...] = ()
    micro_batch: int = 4


_EXPERTS = (
    "model.config.model_type=qwen3_vl_moe",
    "model.config.text_config.num_experts=4",
    "model.config.text_config.num_experts_per_tok=2",
    "model.config.text_config.moe_intermediate_size=128",
    "model.config.text_config.output_router_logits=true",
)
_EXPERTS_3_5 = (
    "model.config.model_type=qwen3_5_moe",
    "model.config.text_config.num_experts=4",
    "model.config.text_config.num_experts_per_tok=2",
    "model.config.text_config.moe_intermediate_size=128",
    "model.config.text_config.shared_expert_intermediate_size=128",
)
_PLAIN = ("data.packing=false", "data.packing_length=null", "train.recompute=act")
_LORA = ("model.lora={r: 4, lora_alpha: 8, target_modules: [all-linear], modules_to_save: [mergers]}",)
_LORA_EXPERTS = ("model.lora={r: 4, lora_alpha: 8, target_modules: [all-linear]}",)
_DORA = (*_LORA, "model.lora.use_dora=true")
_VIDEOS = ("data.train=[runs/videos.jsonl]", "data.eval=[]")
_DPO = (
    "train.objective=preference",
    "preference.loss_type=[sigmoid, bco_pair, sft]",
    "data.train=[pairs/train.jsonl]",
    "data.eval=[pairs/test.jsonl]",
)
_KTO = (
    "train.objective=preference",
    "preference.loss_type=[kto]",
    "data.train=[pairs/rated.jsonl]",
    "data.eval=[]",
    "data.packing=false",
    "data.packing_length=null",
)
# Answers scored while training, the best checkpoint, averaged weights, freezing by step, rates by
# part and layer.
_WATCHED = (
    "data.eval=[runs/digits/data/test.jsonl]",
    "train.eval_steps=1",
    "train.per_device_eval_batch_size=1",
    "train.eval={metrics: [exact_match, anls], num_samples: 4, max_new_tokens: 4}",
    "train.best={metric: loss, mode: min, patience: 9, load_at_end: true}",
    "train.ema={decay: 0.9}",
    "train.unfreeze=[{at: 1, patterns: [vision]}]",
    "train.layer_decay={vision: 0.8, language: 0.9}",
    "train.part_learning_rates={mergers: 5e-4}",
)
_TOKENS = ("train.max_steps=null", "train.max_tokens=5000", "train.warmup_steps=0")
_MIX_OF_QWEN3_5 = (
    *_TOKENS,
    "data.train=[{path: runs/digits_corpus/captions.jsonl, format: image_text, weight: 0.5}, "
    "{path: runs/digits_corpus/pages.jsonl, format: interleaved, weight: 0.5}]",
    "data.eval=[{path: runs/digits_corpus/held_out_text.jsonl, format: text}]",
    "data.processor=runs/digits_corpus/processor",
)


_WATCHED_POLICY = (
    "data.eval=[data/demonstrations/held_out.jsonl]",
    "data.image_transforms=openpi",
    "train.eval_steps=1",
    "train.per_device_eval_batch_size=2",
    "train.best={metric: loss, mode: min, patience: 9, load_at_end: true}",
    "train.ema={decay: 0.9}",
    "train.unfreeze=[{at: 1, patterns: [vision]}]",
    "train.layer_decay={vision: 0.8, expert: 0.9}",
    "train.part_learning_rates={projector: 5e-4}",
)
_ROBOTS = (
    "data.train=[]",
    "data.dataset_mixture={datasets: [{root: '{tests}/data/lerobot/v30_l06_language'}, "
    "{root: '{tests}/data/lerobot/v21_video', excluded_episodes: [5]}], weights: [2.0, 1.0], "
    "action_freq: 10.0, val_split_ratio: 0.3}",
)
_START = (
    "model.pretrained={tests}/golden/pi07_start/hub_same",
    "data.processor=data/gemma_processor",
    "model.compute_dtype=float32",
    "parallel={}",
    "model.config.resize_imgs_with_padding=[28, 28]",
    "model.config.n_obs_steps=2",
    "model.config.dropout=0.0",
    "model.config.proj_width=16",
    "model.config.chunk_size=4",
    "model.config.n_action_steps=4",
    "model.config.spacetime_layer_stride=2",
    "model.config.vlm_config={gemma_expert_config: {hidden_size: 16, intermediate_size: 32, "
    "adarms_cond_dim: 16, vocab_size: 8}}",
    "model.policy.prompt_max_length=16",
    "model.policy.response_max_length=16",
)


def _from(run: str) -> tuple[str, ...]:
    return ("model.config=null", f"model.pretrained={{{run}}}/final", "data.processor=null")


_DIGITS, _QWEN3_5 = "quickstart/digits.yaml", "quickstart/digits_qwen3_5.yaml"
_MIX, _ARM, _PLANNER = "quickstart/digits_pretraining.yaml", "pi07/tiny_cpu.yaml", "pi07/planner_cpu.yaml"
_VL, _MOE, _3_5, _3_5_MOE = "Qwen3-VL", "Qwen3-VL with experts", "Qwen3.5", "Qwen3.5 with experts"
RUNS = {
    "packed": Run(_VL, "packed", _DIGITS),
    "plain": Run(_VL, "plain, recomputed", _DIGITS, _PLAIN, 8),
    "watched": Run(_VL, "answers while training, best, EMA, freezing, rates", _DIGITS, _WATCHED),
    "lora": Run(_VL, "LoRA", _DIGITS, (*_from("packed"), *_LORA)),
    "dora": Run(_VL, "DoRA", _DIGITS, (*_from("packed"), *_DORA)),
    "dpo": Run(_VL, "preference, packed", _DIGITS, (*_from("packed"), *_DPO)),
    "kto": Run(_VL, "preference, rated", _DIGITS, (*_from("packed"), *_KTO), 8),
    "dpo lora": Run(_VL, "preference, LoRA", _DIGITS, (*_from("packed"), *_DPO, *_LORA)),
    "mix": Run(_VL, "pretraining", _MIX, _TOKENS),
    "answers": Run(_VL, "fine-tuning after pretraining", "quickstart/digits_answers.yaml", ("model.pretrained={mix}/final",), 8),
    "videos": Run(_VL, "videos", _DIGITS, _VIDEOS),
    "bfloat16": Run(_VL, "bfloat16", _DIGITS, ("model.compute_dtype=bfloat16",)),
    "experts": Run(_MOE, "packed", _DIGITS, _EXPERTS),
    "experts lora": Run(_MOE, "LoRA", _DIGITS, (*_from("experts"), *_LORA_EXPERTS)),
    "experts dpo": Run(_MOE, "preference, packed", _DIGITS, (*_from("experts"), *_DPO)),
    "experts mix": Run(_MOE, "pretraining", _MIX, (*_EXPERTS, *_TOKENS)),
    "experts watched": Run(_MOE, "answers while training, best, EMA, freezing, rates", _DIGITS, (*_EXPERTS, *_WATCHED)),
    "qwen3.5": Run(_3_5, "packed", _QWEN3_5),
    "qwen3.5 plain": Run(_3_5, "plain, recomputed", _QWEN3_5, _PLAIN, 8),
    "qwen3.5 lora": Run(_3_5, "LoRA", _QWEN3_5, (*_from("qwen3.5"), *_LORA)),
    "qwen3.5 dpo": Run(_3_5, "preference, packed", _QWEN3_5, (*_from("qwen3.5"), *_DPO)),
    "qwen3.5 mix": Run(_3_5, "pretraining", _QWEN3_5, _MIX_OF_QWEN3_5),
    "qwen3.5 watched": Run(_3_5, "answers while training, best, EMA, freezing, rates", _QWEN3_5, _WATCHED),
    "qwen3.5 videos": Run(_3_5, "videos", _QWEN3_5, _VIDEOS),
    "qwen3.5 experts": Run(_3_5_MOE, "packed", _QWEN3_5, _EXPERTS_3_5),
    "pi07": Run("pi07 policy", "plain", _ARM),
    "pi07 lora": Run("pi07 policy", "LoRA of openpi", _ARM, (*_from("pi07"), "model.lora=openpi")),
    "pi07 lora of lerobot": Run("pi07 policy", "LoRA of LeRobot", _ARM, (*_from("pi07"), "model.lora=lerobot")),
    "pi07 watched": Run("pi07 policy", "errors of actions, best, EMA, freezing, rates, changed images", _ARM, _WATCHED_POLICY),
    "pi07 robots": Run("pi07 policy", "mixture of LeRobot datasets", _ARM, _ROBOTS),
    "pi07 start": Run("pi07 policy", "from Gemma 3", "pi07/one_node_8_gpus.yaml", _START),
    "planner": Run("pi07 planner", "plain", _PLANNER),
    "planner lora": Run("pi07 planner", "LoRA", _PLANNER, (*_from("planner"), "model.lora={r: 4, target_modules: [all-linear]}")),
}  # fmt: skip


class Row(NamedTuple):
    """A run of `RUNS` under one topology, perhaps continued under another."""

    run: str
    topology: str
    then: str = ""
    launcher: str = ""
    is_heavy: bool = False


def _rows(run: str, **topologies: str) -> Iterator[Row]:
    for topology, then in topologies.items():
        yield Row(run, topology, then)


TRAINING = [
    # Qwen3-VL: whole processes by both launchers first.
    Row("packed", "dp2", "sharding2 stage 3", launcher="paddle-vl train --nproc 2"),
    Row("packed", "dp2 mp2 SP", launcher="fleetrun tools/train.py"),
    *_rows("packed", **{
        "1 rank": "1 rank",
        "mp2 SP": "pp2",
        "pp2": "1 rank",
        "sharding2 stage 1": "mp2 SP",
        "sharding2 stage 2": "dp2",
        "sharding2 stage 3": "sharding2 stage 3",
        "cp2 gather": "cp2 ulysses stage 3",
        "cp2 ulysses": "cp2 gather stage 3",
        "colocated pp2": "pp2 by cost",
        "colocated pp2, divided tower": "colocated pp2",
    }),
    *_rows("plain", **{
        "dp2": "", "mp2": "", "pp2 by cost": "", "sharding2 stage 1": "", "sharding2 stage 2": "",
        "sharding2 stage 3": "", "cp2 gather": "", "cp2 ulysses": "", "colocated pp2": "",
    }),
    *_rows("watched", **{"mp2 SP": "pp2", "sharding2 stage 3": "", "colocated pp2": "", "cp2 gather": ""}),
    *_rows("lora", **{
        "mp2 SP": "sharding2 stage 3", "pp2": "", "cp2 gather": "", "cp2 ulysses": "", "colocated pp2": "",
    }),
    *_rows("dora", **{"mp2 SP": "", "sharding2 stage 3": "pp2"}),
    *_rows("dpo", **{
        "dp2": "mp2 SP", "pp2": "", "sharding2 stage 2": "", "sharding2 stage 3": "", "colocated pp2": "",
    }),
    *_rows("kto", **{"pp2": "", "mp2 SP": ""}),
    *_rows("dpo lora", **{"mp2 SP": ""}),
    *_rows("mix", **{
        "dp2": "mp2 SP", "pp2": "", "sharding2 stage 2": "cp2 gather", "cp2 ulysses": "", "colocated pp2": "",
    }),
    *_rows("answers", **{"dp2": "", "mp2 SP": ""}),
    *_rows("videos", **{"mp2 SP": "", "cp2 gather": "", "cp2 ulysses": "", "colocated pp2": ""}),
    *_rows("qwen3.5 videos", **{"mp2 SP": ""}),
    *_rows("experts", **{
        "ep2 sharding2": "ep2 mp2 SP", "ep2 sharding2 stage 3": "", "ep2 dp2": "", "ep2 mp2 SP": "",
        "ep2 capacity": "", "ep2 cp2 gather": "", "ep2 cp2 ulysses": "", "pp2": "", "colocated pp2": "",
        "sharding2 stage 2": "", "mp2 SP": "",
    }),
    *_rows("experts lora", **{"ep2 sharding2": ""}),
    *_rows("experts dpo", **{"ep2 mp2 SP": ""}),
    *_rows("experts mix", **{"ep2 sharding2": ""}),
    *_rows("experts watched", **{"ep2 sharding2 stage 3": ""}),
    *_rows("qwen3.5", **{
        "dp2": "mp2 SP", "mp2 SP": "pp2", "pp2": "", "sharding2 stage 1": "", "sharding2 stage 2": "",
        "sharding2 stage 3": "", "colocated pp2": "",
    }),
    *_rows("qwen3.5 plain", **{"mp2 SP": "", "colocated pp2": ""}),
    *_rows("qwen3.5 lora", **{"mp2 SP": "", "sharding2 stage 3": ""}),
    *_rows("qwen3.5 dpo", **{"mp2 SP": "", "pp2": ""}),
    *_rows("qwen3.5 mix", **{"dp2": ""}),
    *_rows("qwen3.5 watched", **{"mp2 SP": ""}),
    *_rows("qwen3.5 experts", **{"ep2 sharding2": "", "ep2 mp2 SP": ""}),
    *_rows("pi07", **{
        "dp2": "mp2 SP", "mp2 SP": "pp2", "pp2": "", "sharding2 stage 1": "", "sharding2 stage 2": "",
        "sharding2 stage 3": "1 rank", "colocated pp2": "", "colocated pp2, divided tower": "",
    }),
    *_rows("pi07 lora", **{"mp2 SP": "", "sharding2 stage 3": ""}),
    *_rows("pi07 watched", **{"sharding2 stage 2": "", "mp2 SP": ""}),
    *_rows("pi07 lora of lerobot", **{"pp2": ""}),
    *_rows("pi07 robots", **{"dp2": "1 rank"}),
    *_rows("pi07 start", **{"sharding2 stage 3": ""}),
    *_rows("planner", **{
        "dp2": "mp2 SP", "mp2 SP": "pp2", "pp2": "", "sharding2 stage 2": "", "sharding2 stage 3": "",
        "colocated pp2": "",
    }),
    *_rows("planner lora", **{"sharding2 stage 3": ""}),
]  # fmt: skip
HEAVY = [
    *_rows("packed", **{
        "mp2 SP pp2": "", "sharding2 stage 3 mp2 SP": "", "sharding2 pp2": "",
        "dp2 sharding2 stage 2": "", "cp2 gather mp2 SP": "", "cp2 ulysses mp2 SP": "",
        "cp2 gather pp2": "", "cp2 ulysses pp2": "", "pp2 dualpipev": "", "colocated dp2 pp2": "",
    }),
]  # fmt: skip


class Line(NamedTuple):
    """A command line that ends by itself.

    Attributes:
        family, what: as in `Run`.
        line: its words; `{NAME}` as in `Run.settings`, and `{row}` is a new path.
        printed: a pattern of what it prints.
        made: files that are there then.
    """

    family: str
    what: str
    line: str
    printed: str
    made: tuple[str, ...] = ()
    ranks: int = 1
    is_heavy: bool = False

    @property
    def command(self) -> str:
        return self.line.split()[0]


_ASK = "--image runs/digits/data/images/0000.png --prompt 'Which digit is this?' --max-new-tokens 6"
_TEST = "--data runs/digits/data/test.jsonl --limit 8 --max-new-tokens 6"
_HELD_OUT = "--data data/demonstrations/held_out.jsonl"
_SCORES = r"exact answers:(.|\n)*all answers +\d"
_ERRORS = r"(?i)mae(.|\n)*\d"
_LEROBOT = "{tests}/data/lerobot"
COMMANDS = [
    *(
        line
        for family, run in ((_VL, "packed"), (_MOE, "experts"), (_3_5, "qwen3.5"))
        for line in (
            Line(family, "loss and exact answers", f"evaluate {{{run}}} {_TEST}", _SCORES),
            Line(family, "metrics", f"evaluate {{{run}}} {_TEST} --metrics exact_match anls --json {{row}}.json "
                 "--predictions {row}.jsonl", r"anls", ("{row}.json", "{row}.jsonl")),
            Line(family, "a benchmark", f"evaluate {{{run}}} --suite runs/suite.yaml --limit 8", r"exact_match"),
            Line(family, "an image", f"generate {{{run}}} {_ASK}", r"."),
            Line(family, "samples of a run", f"show-data {{{run}}}/config.yaml --samples 2 --page {{row}}.html", r"\[\[",
                 ("{row}.html",)),
        )
    ),
    Line(_VL, "adapters", f"evaluate {{lora}} {_TEST}", _SCORES),
    Line(_VL, "a video", f"generate {{packed}} --video {_LEROBOT}/v21_video/videos/chunk-000/observation.images.front/"
         "episode_000000.mp4 --prompt 'What?' --max-new-tokens 6", r"."),
    Line(_VL, "pairs of answers", "show-data {dpo}/config.yaml --samples 2", r"\[\["),
    Line(_VL, "packed documents", "show-data {mix}/config.yaml --samples 2", r"\[\["),
    Line(_VL, "log-probabilities of the reference", "precompute-reference {dpo}/config.yaml", r"reference"),
    Line(_VL, "token files", "tokenize runs/digits_corpus/text.jsonl --tokenizer runs/digits_corpus/processor "
         "--output {row}", r"", ("{row}.bin", "{row}.idx")),
    Line(_VL, "rows of a file", "convert-data runs/digits/data/test.jsonl {row}.jsonl", r"", ("{row}.jsonl",)),
    Line(_VL, "one run", "report {packed} --output {row}", r"report written", ("{row}/report.html",)),
    Line(_VL, "several runs", "report {packed} {plain} --output {row}", r"report written", ("{row}/report.html",)),
    Line("pi07 policy", "one run", "report {pi07 watched} --output {row}", r"report written", ("{row}/report.html",)),
    *(
        Line(_VL, f"for {engine}", f"check-folder {{packed}} --for {engine}", r"fits")
        for engine in ("vllm", "sglang", "fastdeploy", "transformers")
    ),
    *(
        Line(_MOE, f"for {engine}", f"check-folder {{experts}} --for {engine}", r"fits")
        for engine in ("vllm", "sglang", "fastdeploy", "transformers")
    ),
    *(
        Line(_3_5, f"for {engine}", f"check-folder {{qwen3.5}} --for {engine}", r"fits")
        for engine in ("vllm", "sglang", "transformers")
    ),
    Line(_VL, "adapters for vllm", "check-folder {lora} --for vllm", r""),
    Line(_VL, "time of phases", "profile {packed}/config.yaml --warmup 1 --steps 2 --json {row}.json", r"forward", ("{row}.json",)),
    Line("pi07 policy", "time of phases, 2 ranks", "profile configs/pi07/tiny_cpu.yaml --synthetic --warmup 1 --steps 2 "
         "parallel.sharding_degree=2 parallel.sharding_stage=2", r"forward", ranks=2),
    Line("pi07 policy", "errors of actions", f"evaluate {{pi07}} {_HELD_OUT}", _ERRORS),
    Line("pi07 policy", "adapters", f"evaluate {{pi07 lora}}/checkpoint-2 {_HELD_OUT}", _ERRORS),
    Line("pi07 planner", "losses", f"evaluate {{planner}} {_HELD_OUT}", r"(?i)loss|CE"),
    Line("pi07 policy", "statistics of a dataset", f"compute-stats {_LEROBOT}/v21_video --output {{row}}.json", r"",
         ("{row}.json",)),
    Line("all", "this installation", "doctor --quick", r"", is_heavy=True),
]  # fmt: skip


class Answers(NamedTuple):
    """Commands whose answers, or actions, are those of another.

    Attributes:
        command, family, what: of the row.
        run: of `RUNS`; its model answers.
    """

    command: str
    family: str
    what: str
    run: str


_ONE = "the answer of generate"
CHATS = [
    Answers("chat, serve", family, _ONE, run)
    for family, run in ((_VL, "packed"), (_MOE, "experts"), (_3_5, "qwen3.5"))
]
ADAPTERS = [Answers("merge, serve --lora-modules", _VL, "the answer of adapters", "lora")]
EXPORTS = [
    Answers("export, and its folder", family, _ONE, run)
    for family, run in ((_VL, "packed"), (_MOE, "experts"))
]
POLICIES = [Answers("serve-policy, export", "pi07 policy", "the same actions", "pi07")]
