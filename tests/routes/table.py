"""What README and docs promise of `paddle-vl train`, as data: a row for each family, capability and
topology, which the tests beside this file run and docs/testing.md shows; `lines` has the other
commands.

A row is a run of `RUNS` under a topology of `TOPOLOGIES`: its losses and saved weights are those of
the same run on one device. With `then` another topology (or the same: then to the bit) continues
the checkpoint of step 2. Settings are those of the configurations in `configs/`, but for a few
steps and an optimizer that does not amplify rounding.
"""

from collections.abc import Iterator
from typing import NamedTuple

# The same samples in so many micro-batches in place of two.
_IN_3, _IN_4, _IN_6 = (f"train.gradient_accumulation_steps={number}" for number in (3, 4, 6))
_SP = ("parallel.sequence_parallel=true", "data.pad_to_multiple_of=2")
_DP, _MP, _PP, _SHARDING = (f"parallel.{axis}_degree=2" for axis in ("dp", "mp", "pp", "sharding"))
_STAGE_2, _STAGE_3 = "parallel.sharding_stage=2", "parallel.sharding_stage=3"
_GATHER = (_SHARDING, "parallel.cp_degree=2", "data.pad_to_multiple_of=2")
_ULYSSES = (*_GATHER, "parallel.cp_attention=ulysses")
_ROWS_OF_4 = (_MP, _SP[0], "data.pad_to_multiple_of=4")
_VIRTUAL = ("parallel.pp_degree=3", "parallel.num_virtual_stages=2")
_COLOCATED, _EP = (_PP, "parallel.schedule=colocated"), "parallel.ep_degree=2"
# Settings by name.
TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "1 rank": (),
    "dp2": (_DP,),
    "mp2": (_MP,),
    "mp2 SP": (_MP, *_SP),
    "pp2": (_PP,),
    # Four layers, and six.
    "pp2 dualpipev": (_PP, "parallel.pp_schedule=dualpipev", _IN_4),
    "pp3 interleaved": (*_VIRTUAL, _IN_6),
    "pp3 fthenb": (*_VIRTUAL, "parallel.pp_schedule=fthenb", _IN_3),
    "pp3 balanced_memory": (*_VIRTUAL, "parallel.pp_schedule=balanced_memory", _IN_6),
    "pp2 by cost": (_PP, "parallel.pp_split=cost", "parallel.pp_shapes=dynamic"),
    "sharding2": (_SHARDING,),
    "sharding2 stage 2": (_SHARDING, _STAGE_2),
    "sharding2 stage 3": (_SHARDING, _STAGE_3),
    "cp2 gather": _GATHER,
    "cp2 gather stage 3": (*_GATHER, _STAGE_3, "parallel.cp_gather_overlap=true"),
    "cp2 ulysses": _ULYSSES,
    "cp2 ulysses stage 3": (*_ULYSSES, _STAGE_3),
    "colocated pp2": _COLOCATED,
    "colocated pp2, tower mp2": (*_COLOCATED, "parallel.encoder.mp_degree=2"),
    "ep2": (_EP, _SHARDING),
    "ep2 stage 3": (_EP, _SHARDING, _STAGE_3),
    "ep2 dp2": (_EP, _DP),
    "ep2 mp2 SP": (_EP, _MP, *_SP),
    "ep2 with capacity": (_EP, _SHARDING, "parallel.expert_capacity_factor=1.5"),
    "ep2 cp2 gather": (_EP, *_GATHER),
    "ep2 cp2 ulysses": (_EP, *_ULYSSES),
    # Of four ranks; digits_4_processes.yaml has the first.
    "dp2 mp2 SP": (_DP, _MP, *_SP),
    "mp2 SP pp2": (_MP, *_SP, _PP),
    "sharding2 stage 3 mp2 SP": (_SHARDING, _STAGE_3, _MP, *_SP),
    "sharding2 pp2": (_SHARDING, _PP),
    "dp2 sharding2 stage 2": (_DP, _SHARDING, _STAGE_2),
    "cp2 gather mp2 SP": (*_GATHER, *_ROWS_OF_4),
    "cp2 ulysses mp2 SP": (*_ULYSSES, *_ROWS_OF_4),
    "cp2 gather pp2": (*_GATHER, _PP),
    "cp2 ulysses pp2": (*_ULYSSES, _PP),
    "colocated dp2 pp2": (_DP, *_COLOCATED, "parallel.encoder.mp_degree=2"),
}


class Run(NamedTuple):
    """A training on one device, which rows are compared with.

    Attributes:
        family, what: as in README, and the capability.
        config: file in `configs/`.
        settings: further ones; `{NAME}` is the folder of another run, `{tests}` that of the tests.
        micro_batch: samples or rows in a micro-batch of all data ranks; a step has two.
    """

    family: str
    what: str
    config: str
    settings: tuple[str, ...] = ()
    micro_batch: int = 4


def _named(**settings: object) -> tuple[str, ...]:
    """Settings whose names have no dots after their section."""
    return tuple(f"{name.replace('__', '.')}={value}" for name, value in settings.items())


def _from(run: str) -> tuple[str, ...]:
    return _named(
        model__config="null", model__pretrained=f"{{{run}}}/final", data__processor="null"
    )


def _lora(**more: str) -> tuple[str, ...]:
    adapted = ["r: 4", "lora_alpha: 8", "target_modules: [all-linear]"]
    adapted += [f"{name}: {value}" for name, value in more.items()]
    return (f"model.lora={{{', '.join(adapted)}}}",)


def _config(*settings: str) -> tuple[str, ...]:
    return tuple(f"model.config.{setting}" for setting in settings)


_EXPERTS = _config(
    "model_type=qwen3_vl_moe",
    "text_config.num_experts=4",
    "text_config.num_experts_per_tok=2",
    "text_config.moe_intermediate_size=96",
)
# A mean over micro-batches, which data ranks divide.
_BALANCE = _config("text_config.output_router_logits=true")
_EXPERTS_OF_QWEN3_5 = (
    *_config("model_type=qwen3_5_moe", "text_config.shared_expert_intermediate_size=128"),
    *_EXPERTS[1:],
)
_TIED = _config("tie_word_embeddings=true")
_PADDED = _named(data__packing="false", data__packing_length="null")
_VIDEOS = _named(data__train="[runs/videos.jsonl]", data__eval="[]")
_PREFERENCE = ("train.objective=preference",)
_DPO = (
    *_PREFERENCE,
    "preference.loss_type=[sigmoid, bco_pair, sft]",
    *_named(data__train="[pairs/train.jsonl]", data__eval="[pairs/test.jsonl]"),
)
_KTO = (
    *(*_PREFERENCE, *_PADDED, "preference.loss_type=[kto]"),
    *_named(data__train="[pairs/rated.jsonl]", data__eval="[]"),
)
# The third step learns a generation that the checkpoint of the second has.
_GRPO = (
    *("grpo.rewards=[runs/letters.py:letters]", "grpo.num_generations=2", "grpo.beta=0.04"),
    *("grpo.max_completion_length=6", "grpo.num_iterations=3", "train.learning_rate=1e-2"),
    *_named(data__eval="[]", train__eval="null"),
)
# A share of the run warms up, which is counted in tokens.
_TOKENS = _named(train__max_steps="null", train__max_tokens=5000, train__warmup_steps=0)
_TOKEN_FILES = (
    *_TOKENS,
    "data.train=[{path: runs/digits_corpus/captions.jsonl, format: image_text, weight: 0.5}, "
    "{path: runs/digits_corpus/tokens, format: text, weight: 0.5}]",
    "data.eval=[]",
)
_TEXT_ALONE = (
    *_TOKENS,
    "data.train=[{path: runs/digits_corpus/text.jsonl, format: text}]",
    "data.eval=[]",
)
_CORPUS = (
    *_TOKENS,
    "data.train=[{path: runs/digits_corpus/captions.jsonl, format: image_text, weight: 0.5}, "
    "{path: runs/digits_corpus/pages.jsonl, format: interleaved, weight: 0.5}]",
    "data.eval=[{path: runs/digits_corpus/held_out_text.jsonl, format: text}]",
)
_ITS_PROCESSOR = "data.processor=runs/digits_corpus/processor"
_WATCHED = _named(
    train__eval_steps=1,
    train__best="{metric: loss, mode: min, patience: 9, load_at_end: true}",
    train__ema="{decay: 0.9}",
    train__unfreeze="[{at: 1, patterns: [vision]}]",
)
_ANSWERED = (
    *_WATCHED,
    "train.per_device_eval_batch_size=1",
    "train.eval={metrics: [exact_match, anls], num_samples: 4, max_new_tokens: 4}",
    "train.layer_decay={vision: 0.8, language: 0.9}",
    "train.part_learning_rates={mergers: 5e-4}",
)
_ACTED = (
    *_WATCHED,
    "train.per_device_eval_batch_size=2",
    "data.eval=[data/demonstrations/held_out.jsonl]",
    "train.layer_decay={vision: 0.8, backbone: 0.9}",
    "train.part_learning_rates={projector: 5e-4}",
)
_ROBOTS = (
    "data.train=[]",
    "data.dataset_mixture={datasets: [{root: '{tests}/data/lerobot/v30_l06_language'}, "
    "{root: '{tests}/data/lerobot/v21_video', excluded_episodes: [5]}], weights: [2.0, 1.0], "
    "action_freq: 10.0, val_split_ratio: 0.3}",
)
_GEMMA_FOLDER = (
    *_named(model__pretrained="{tests}/golden/pi07_start/hub_same", model__compute_dtype="float32"),
    *("data.processor=data/gemma_processor", "model.config.resize_imgs_with_padding=[28, 28]"),
)
_GEMMA = (
    *(*_GEMMA_FOLDER, "parallel={}", *_config("n_obs_steps=2", "dropout=0.0", "proj_width=16")),
    *_config("chunk_size=4", "n_action_steps=4", "spacetime_layer_stride=2"),
    "model.config.vlm_config={gemma_expert_config: {hidden_size: 16, intermediate_size: 32, "
    "adarms_cond_dim: 16, vocab_size: 8}}",
    *_named(model__policy__prompt_max_length=16, model__policy__response_max_length=16),
)
_GEMMA_PLANS = (*_GEMMA_FOLDER, *_config("vlm_config={disable_action_expert: true}"))
_ALL_SAVED = "train.save_total_limit=null"
_UNASKED = (_ALL_SAVED, "data.eval=[]", "train.eval=null")
_PAGES = (
    "data.train=[{each}]".format(
        each=", ".join(
            f"runs/documents/data/{task}_train.jsonl"
            for task in ("text", "table", "formula", "spotting")
        )
    ),
    *(*_UNASKED, "data.checks=[tables, spotting, text, pixels]"),
)
_GUARDED = (
    *(*_PAGES, *_WATCHED, "train.per_device_eval_batch_size=1"),
    "data.eval=[{path: runs/documents/data/text_val.jsonl, name: text, metrics: [cer]}, "
    "{path: runs/documents/data/table_val.jsonl, name: tables, metrics: [teds]}]",
    "train.eval={metrics: [cer, ned], num_samples: 4, max_new_tokens: 4}",
    "train.guard={metric: cer, max_drop: 0.05, action: warn}",
)
_PAIRS_OF_PAGES = (
    *(*_PREFERENCE, "preference.loss_type=[sigmoid, bco_pair, sft]"),
    *("data.train=[runs/documents/data/pairs.jsonl]", "data.max_length=128", *_UNASKED),
)
_RATED_PAGES = (
    *(*_PREFERENCE, *_PADDED, "preference.loss_type=[kto]"),
    *("data.train=[runs/documents/data/rated.jsonl]", *_UNASKED),
)
_GRPO_PAGES = (
    *("train.objective=grpo", *_PADDED, *_GRPO, _ALL_SAVED),
    "data.train=[runs/documents/data/prompts.jsonl]",
)
_MERGERS = _lora(modules_to_save="[mergers]")
_DORA = _lora(use_dora="true")
_FROZEN_TABLES = ("model.freeze=['*ngram_embedding.weight']",)
VL, MOE = "Qwen3-VL", "Qwen3-VL with experts"
QWEN3_5, QWEN3_5_MOE = "Qwen3.5", "Qwen3.5 with experts"
# The root in the gates of n-grams amplifies the rounding of a sum in another order.
_NO_NGRAMS = ("model.config.text_config.ple_layer_ids=[]",)
QWEN4_EXP = "Qwen4-Exp"
OCR = "PaddleOCR-VL"
POLICY, PLANNER = "pi07 policy", "pi07 planner"
_DIGITS, _DIGITS_3_5 = "quickstart/digits.yaml", "quickstart/digits_qwen3_5.yaml"
_DIGITS_4 = "quickstart/digits_qwen4_exp.yaml"
_MIX, _ANSWERS = "quickstart/digits_pretraining.yaml", "quickstart/digits_answers.yaml"
_DOCUMENTS, _PROMPTS = "quickstart/documents.yaml", "quickstart/digits_grpo.yaml"
_ARM, _PLANS, _EIGHT = "pi07/tiny_cpu.yaml", "pi07/planner_cpu.yaml", "pi07/one_node_8_gpus.yaml"
_ANSWERING = "answers while training, best, average, freezing by step, rates"
_ACTING = "errors of actions, best, average, freezing by step, rates"
_REWARDED = "learning from rewards"
_PAIRS, _RATED, _MIXED = "preference of packed pairs", "preference of rated answers", "pretraining"
RUNS = {
    "packed": Run(VL, "packed", _DIGITS),
    "tied": Run(VL, "packed, tied head", _DIGITS, _TIED),
    "deep": Run(VL, "packed, six layers", _DIGITS, _config("text_config.num_hidden_layers=6"), 3),
    "seeded": Run(VL, "packed, of another seed", _DIGITS, ("train.seed=7",)),
    "padded": Run(VL, "padded, recomputed", _DIGITS, (*_PADDED, "train.recompute=act"), 8),
    "videos": Run(VL, "videos", _DIGITS, _VIDEOS),
    "watched": Run(VL, _ANSWERING, _DIGITS, _ANSWERED),
    "lora": Run(VL, "LoRA", _DIGITS, (*_from("packed"), *_MERGERS)),
    "adapters": Run(VL, "LoRA alone", _DIGITS, (*_from("packed"), *_lora())),
    "dora": Run(VL, "DoRA", _DIGITS, (*_from("packed"), *_DORA)),
    "dpo": Run(VL, _PAIRS, _DIGITS, (*_from("packed"), *_DPO)),
    "dpo lora": Run(VL, f"{_PAIRS}, LoRA", _DIGITS, (*_from("packed"), *_DPO, *_MERGERS)),
    "kto": Run(VL, _RATED, _DIGITS, (*_from("packed"), *_KTO), 8),
    "grpo": Run(VL, _REWARDED, _PROMPTS, (*_GRPO, "model.pretrained={packed}/final")),
    "grpo lora": Run(
        VL, f"{_REWARDED}, LoRA", _PROMPTS, (*_GRPO, "model.pretrained={packed}/final", *_lora())
    ),
    "mix": Run(VL, _MIXED, _MIX, _TOKENS),
    "tokens": Run(VL, "pretraining on token files", _MIX, _TOKEN_FILES),
    "text": Run(VL, "pretraining on text alone", _MIX, _TEXT_ALONE),
    "answers": Run(VL, "after pretraining", _ANSWERS, ("model.pretrained={mix}/final",), 8),
    "moe": Run(MOE, "packed", _DIGITS, _EXPERTS),
    "moe balanced": Run(MOE, "with the balance loss", _DIGITS, (*_EXPERTS, *_BALANCE)),
    "moe watched": Run(MOE, _ANSWERING, _DIGITS, (*_EXPERTS, *_ANSWERED)),
    "moe lora": Run(MOE, "LoRA", _DIGITS, (*_from("moe"), *_lora())),
    "moe dora": Run(MOE, "DoRA", _DIGITS, (*_from("moe"), *_DORA)),
    "moe dpo": Run(MOE, _PAIRS, _DIGITS, (*_from("moe"), *_DPO)),
    "moe kto": Run(MOE, _RATED, _DIGITS, (*_from("moe"), *_KTO), 8),
    "moe grpo": Run(MOE, _REWARDED, _PROMPTS, (*_GRPO, "model.pretrained={moe}/final")),
    "moe mix": Run(MOE, _MIXED, _MIX, (*_EXPERTS, *_TOKENS)),
    "3.5": Run(QWEN3_5, "packed", _DIGITS_3_5),
    "3.5 padded": Run(QWEN3_5, "padded", _DIGITS_3_5, _PADDED, 8),
    "3.5 videos": Run(QWEN3_5, "videos", _DIGITS_3_5, _VIDEOS),
    "3.5 watched": Run(QWEN3_5, _ANSWERING, _DIGITS_3_5, _ANSWERED),
    "3.5 lora": Run(QWEN3_5, "LoRA", _DIGITS_3_5, (*_from("3.5"), *_MERGERS)),
    "3.5 dora": Run(QWEN3_5, "DoRA", _DIGITS_3_5, (*_from("3.5"), *_DORA)),
    "3.5 dpo": Run(QWEN3_5, _PAIRS, _DIGITS_3_5, (*_from("3.5"), *_DPO)),
    "3.5 kto": Run(QWEN3_5, _RATED, _DIGITS_3_5, (*_from("3.5"), *_KTO), 8),
    "3.5 grpo": Run(QWEN3_5, _REWARDED, _PROMPTS, (*_GRPO, "model.pretrained={3.5}/final")),
    "3.5 mix": Run(QWEN3_5, _MIXED, _DIGITS_3_5, (*_CORPUS, _ITS_PROCESSOR)),
    "3.5 moe": Run(QWEN3_5_MOE, "packed", _DIGITS_3_5, _EXPERTS_OF_QWEN3_5),
    "4": Run(QWEN4_EXP, "packed", _DIGITS_4),
    "4 plain": Run(QWEN4_EXP, "no n-grams", _DIGITS_4, _NO_NGRAMS),
    "4 frozen": Run(QWEN4_EXP, "frozen tables", _DIGITS_4, _FROZEN_TABLES),
    "4 watched": Run(QWEN4_EXP, _ANSWERING, _DIGITS_4, _ANSWERED),
    "4 lora": Run(QWEN4_EXP, "LoRA", _DIGITS_4, (*_from("4"), *_MERGERS)),
    "4 dora": Run(QWEN4_EXP, "DoRA", _DIGITS_4, (*_from("4"), *_DORA)),
    "4 dpo": Run(QWEN4_EXP, _PAIRS, _DIGITS_4, (*_from("4"), *_DPO)),
    "4 kto": Run(QWEN4_EXP, _RATED, _DIGITS_4, (*_from("4"), *_KTO), 8),
    "4 mix": Run(QWEN4_EXP, _MIXED, _DIGITS_4, (*_CORPUS, _ITS_PROCESSOR)),
    "ocr": Run(OCR, "packed, tied head", _DOCUMENTS, (*_PAGES, *_TIED)),
    "ocr padded": Run(OCR, "padded", _DOCUMENTS, (*_PAGES, *_PADDED), 8),
    "ocr guarded": Run(OCR, f"{_ANSWERING}, guard", _DOCUMENTS, _GUARDED),
    "ocr lora": Run(OCR, "LoRA", _DOCUMENTS, (*_from("ocr"), *_PAGES, *_MERGERS)),
    "ocr dora": Run(OCR, "DoRA", _DOCUMENTS, (*_from("ocr"), *_PAGES, *_DORA)),
    "ocr dpo": Run(OCR, _PAIRS, _DOCUMENTS, (*_from("ocr"), *_PAIRS_OF_PAGES)),
    "ocr kto": Run(OCR, _RATED, _DOCUMENTS, (*_from("ocr"), *_RATED_PAGES), 8),
    "ocr grpo": Run(OCR, _REWARDED, _DOCUMENTS, (*_from("ocr"), *_GRPO_PAGES)),
    "ocr mix": Run(OCR, _MIXED, _DOCUMENTS, (*_CORPUS, "train.eval=null", _ALL_SAVED)),
    "arm": Run(POLICY, "demonstrations", _ARM),
    "arm watched": Run(POLICY, _ACTING, _ARM, (*_ACTED, "data.image_transforms=openpi")),
    "arm openpi": Run(POLICY, "LoRA of openpi", _ARM, (*_from("arm"), "model.lora=openpi")),
    "arm lerobot": Run(POLICY, "LoRA of LeRobot", _ARM, (*_from("arm"), "model.lora=lerobot")),
    "arm dora": Run(POLICY, "DoRA", _ARM, (*_from("arm"), *_DORA)),
    "robots": Run(POLICY, "mixture of LeRobot datasets", _ARM, _ROBOTS),
    "gemma": Run(POLICY, "from Gemma 3", _EIGHT, _GEMMA),
    "planner": Run(PLANNER, "demonstrations", _PLANS),
    "planner gemma": Run(PLANNER, "from Gemma 3", _PLANS, _GEMMA_PLANS),
    "planner watched": Run(PLANNER, "best, average, freezing by step, rates", _PLANS, _ACTED),
    "planner lora": Run(PLANNER, "LoRA", _PLANS, (*_from("planner"), *_lora())),
    "planner dora": Run(PLANNER, "DoRA", _PLANS, (*_from("planner"), *_DORA)),
}


class Row(NamedTuple):
    """A run of `RUNS` under one topology, perhaps continued under another.

    Attributes:
        launcher: the command that starts the ranks; without it the test does, as fleetrun would.
    """

    run: str
    topology: str
    then: str = ""
    launcher: str = ""

    def named(self) -> str:
        """For a test's name."""
        return f"{self.run}: {self.topology}"

    @property
    def promised(self) -> tuple[str, str, str]:
        """Command, family and capability."""
        return "train", RUNS[self.run].family, RUNS[self.run].what

    @property
    def way(self) -> str:
        """How it ran."""
        launched = f" by `{self.launcher}`" * bool(self.launcher)
        return f"{self.topology}{launched}" + f", then {self.then}" * bool(self.then)


def _rows(run: str, *ways: str) -> Iterator[Row]:
    """Rows of a run; a way is a topology, or two with an arrow between them."""
    for way in ways:
        topology, _, then = way.partition(" -> ")
        yield Row(run, topology, then)


CONVERSATIONS = [
    Row("packed", "dp2", "sharding2 stage 3", launcher="paddle-vl train --nproc 2"),
    Row("packed", "dp2 mp2 SP", launcher="fleetrun tools/train.py"),
    *_rows("packed", "1 rank -> 1 rank", "mp2 SP -> pp2", "pp2 -> 1 rank", "sharding2 -> mp2 SP"),
    *_rows("packed", "sharding2 stage 2 -> dp2", "sharding2 stage 3 -> sharding2 stage 3"),
    *_rows("packed", "cp2 gather -> cp2 ulysses stage 3", "cp2 ulysses -> cp2 gather stage 3"),
    *_rows("packed", "colocated pp2 -> pp2 by cost", "colocated pp2, tower mp2 -> colocated pp2"),
    *_rows("tied", "mp2 SP -> pp2"),
    *_rows("padded", "dp2", "mp2", "pp2 by cost", "sharding2", "sharding2 stage 2"),
    *_rows("padded", "sharding2 stage 3", "cp2 gather", "cp2 ulysses", "colocated pp2"),
    *_rows("videos", "mp2 SP", "cp2 gather", "cp2 ulysses", "colocated pp2"),
    *_rows("watched", "mp2 SP -> pp2", "sharding2 stage 3", "colocated pp2", "cp2 gather"),
    *_rows("lora", "mp2 SP -> sharding2 stage 3", "pp2", "cp2 gather", "cp2 ulysses"),
    *_rows("lora", "colocated pp2"),
    *_rows("dora", "mp2 SP", "sharding2 stage 3 -> pp2", "cp2 gather"),
    *_rows("dpo", "dp2 -> mp2 SP", "pp2", "sharding2 stage 2", "sharding2 stage 3"),
    *_rows("dpo", "colocated pp2"),
    *_rows("dpo lora", "mp2 SP"),
    *_rows("kto", "mp2 SP", "pp2"),
    *_rows("grpo", "dp2 -> mp2 SP", "pp2 -> pp2"),
    *_rows("mix", "dp2 -> mp2 SP", "pp2", "sharding2 stage 2 -> cp2 gather", "cp2 ulysses"),
    *_rows("mix", "colocated pp2"),
    *_rows("tokens", "dp2"),
    *_rows("text", "dp2 -> sharding2 stage 2", "sharding2 -> mp2 SP"),
    *_rows("answers", "dp2", "mp2 SP", "pp2 dualpipev"),
    *_rows("deep", "pp3 interleaved", "pp3 fthenb", "pp3 balanced_memory"),
]
FAMILIES = [
    *_rows("moe", "sharding2 stage 2", "ep2 -> ep2 mp2 SP", "ep2 stage 3", "ep2 dp2"),
    *_rows("moe", "ep2 with capacity", "ep2 cp2 ulysses"),
    *_rows("moe balanced", "mp2 SP", "pp2", "colocated pp2", "ep2 mp2 SP", "ep2 cp2 gather"),
    *_rows("moe watched", "ep2 stage 3"),
    *_rows("moe lora", "ep2"),
    *_rows("moe dora", "ep2 mp2 SP"),
    *_rows("moe dpo", "ep2 mp2 SP"),
    *_rows("moe kto", "pp2"),
    *_rows("moe grpo", "ep2"),
    *_rows("moe mix", "ep2"),
    *_rows("3.5", "dp2 -> mp2 SP", "mp2 SP -> pp2", "pp2", "sharding2", "sharding2 stage 2"),
    *_rows("3.5", "sharding2 stage 3 -> sharding2 stage 3", "colocated pp2"),
    *_rows("3.5 padded", "mp2 SP", "colocated pp2"),
    *_rows("3.5 videos", "mp2 SP"),
    *_rows("3.5 watched", "mp2 SP"),
    *_rows("3.5 lora", "mp2 SP", "sharding2 stage 3"),
    *_rows("3.5 dora", "pp2"),
    *_rows("3.5 dpo", "mp2 SP", "pp2"),
    *_rows("3.5 kto", "mp2 SP"),
    *_rows("3.5 grpo", "mp2 SP"),
    *_rows("3.5 mix", "dp2"),
    *_rows("3.5 moe", "ep2", "ep2 mp2 SP"),
    *_rows("4", "1 rank -> 1 rank", "sharding2 -> dp2"),
    *_rows("ocr", "1 rank -> 1 rank", "mp2 SP -> pp2"),
]
POLICIES = [
    *_rows("arm", "dp2 -> mp2 SP", "mp2 SP -> pp2", "pp2", "sharding2", "sharding2 stage 2"),
    *_rows("arm", "sharding2 stage 3 -> sharding2 stage 3", "colocated pp2"),
    *_rows("arm", "colocated pp2, tower mp2"),
    *_rows("arm watched", "sharding2 stage 2", "mp2 SP"),
    *_rows("arm openpi", "mp2 SP", "sharding2 stage 3"),
    *_rows("arm lerobot", "pp2"),
    *_rows("arm dora", "sharding2 stage 3"),
    *_rows("robots", "dp2 -> 1 rank"),
    *_rows("gemma", "sharding2 stage 3"),
    *_rows("planner", "dp2 -> mp2 SP", "mp2 SP -> pp2", "pp2", "sharding2", "sharding2 stage 2"),
    *_rows("planner", "sharding2 stage 3", "colocated pp2"),
    *_rows("planner gemma", "sharding2 stage 3"),
    *_rows("planner watched", "mp2 SP"),
    *_rows("planner lora", "sharding2 stage 3"),
    *_rows("planner dora", "mp2 SP"),
]
HEAVY = [
    *_rows("packed", "mp2 SP pp2", "sharding2 stage 3 mp2 SP", "sharding2 pp2"),
    *_rows("packed", "dp2 sharding2 stage 2", "cp2 gather mp2 SP", "cp2 ulysses mp2 SP"),
    *_rows("packed", "cp2 gather pp2", "cp2 ulysses pp2", "colocated dp2 pp2"),
    *_rows("4", "dp2", "sharding2 stage 2", "sharding2 stage 3", "ep2", "pp2"),
    *_rows("4 plain", "mp2", "mp2 SP", "mp2 SP pp2"),
    *_rows("4 frozen", "dp2"),
    *_rows("4 watched", "1 rank -> 1 rank"),
    *_rows("4 lora", "dp2"),
    *_rows("4 dora", "dp2"),
    *_rows("4 dpo", "dp2"),
    *_rows("4 kto", "1 rank -> 1 rank"),
    # The root in the gates of n-grams amplifies the rounding of a sum in another order.
    *_rows("4 mix", "1 rank -> 1 rank"),
    *_rows("grpo", "1 rank -> 1 rank", "mp2", "sharding2 -> dp2", "sharding2 stage 2 -> 1 rank"),
    *_rows("grpo", "sharding2 stage 3 -> pp2", "cp2 gather", "cp2 ulysses", "dp2 mp2 SP"),
    *_rows("grpo lora", "mp2 SP", "pp2"),
    *_rows("moe grpo", "ep2 mp2 SP", "pp2"),
    *_rows("3.5 grpo", "dp2 -> pp2", "sharding2 stage 3"),
    *_rows("ocr grpo", "dp2 -> mp2 SP", "pp2", "sharding2 stage 2"),
    *_rows("ocr", "dp2", "pp2", "sharding2", "sharding2 stage 2"),
    *_rows("ocr", "sharding2 stage 3 -> sharding2 stage 3", "cp2 gather", "cp2 ulysses stage 3"),
    *_rows("ocr", "colocated pp2, tower mp2 -> colocated pp2"),
    *_rows("ocr padded", "mp2 SP", "colocated pp2"),
    *_rows("ocr guarded", "mp2 SP -> sharding2 stage 3", "colocated pp2"),
    *_rows("ocr lora", "mp2 SP", "sharding2 stage 3 -> pp2"),
    *_rows("ocr dora", "mp2 SP", "colocated pp2"),
    *_rows("ocr dpo", "mp2 SP", "pp2", "sharding2 stage 2"),
    *_rows("ocr kto", "mp2 SP"),
    *_rows("ocr mix", "dp2"),
]
TRAINING = [*CONVERSATIONS, *FAMILIES, *POLICIES]
