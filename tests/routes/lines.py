"""What README and docs promise of the other commands, as data: a row for each command, family and
capability, on models that the runs of `table` trained on one device."""

from typing import NamedTuple

from tests.routes.table import MOE, OCR, PLANNER, POLICY, QWEN3_5, QWEN4_EXP, VL

_EACH = ((VL, "packed"), (MOE, "moe"), (QWEN3_5, "3.5"))
# A model that has hardly learned says nothing unless its tokens are drawn.
DRAWN = "--max-new-tokens 6 --temperature 2 --seed 2"


class Line(NamedTuple):
    """A command line that ends by itself.

    Attributes:
        family, what: as in `table.Run`.
        line: its words; `{NAME}` as in `table.Run.settings`, and `{made}` is a new path.
        printed: a pattern of what it prints.
        made: ends of new paths that are there then.
        way: its topology, by the name in `table.TOPOLOGIES`.
    """

    family: str
    what: str
    line: str
    printed: str = ""
    made: tuple[str, ...] = ()
    way: str = "1 rank"

    @property
    def promised(self) -> tuple[str, str, str]:
        """Command, family and capability."""
        return self.line.split()[0], self.family, self.what


class Answers(NamedTuple):
    """Commands whose answers, actions or weights are those of another, with the model of a run of
    `table.RUNS`."""

    command: str
    family: str
    what: str
    run: str
    way: str = "1 rank"

    @property
    def promised(self) -> tuple[str, str, str]:
        """Command, family and capability."""
        return self[:3]


_ASK = f"--image runs/digits/data/images/0000.png --prompt 'Which digit is this?' {DRAWN}"
_FILM = (
    "{tests}/data/lerobot/v21_video/videos/chunk-000/observation.images.front/episode_000000.mp4"
)
_TEST = "--data runs/digits/data/test.jsonl --limit 8 --max-new-tokens 6"
_LINE = "runs/documents/data/images/text_test/000000.png"
_LINES_OF_TEXT = (
    "--data runs/documents/data/text_test.jsonl --limit 4 --max-new-tokens 4 --metrics cer ned "
    "--json {made}.json --predictions {made}.jsonl"
)
_HELD_OUT = "--data data/demonstrations/held_out.jsonl"
_EXACT = r"exact answers:(.|\n)*all answers +\d"
_ARM = "{tests}/../configs/pi07/tiny_cpu.yaml"
_WORD = r"\w"


def _evaluations(family: str, run: str) -> list[Line]:
    model = f"evaluate {{{run}}}"
    scored = f"{_TEST} --metrics exact_match anls --json {{made}}.json --predictions {{made}}.jsonl"
    return [
        Line(family, "loss and exact answers", f"{model} {_TEST}", _EXACT),
        Line(family, "metrics", f"{model} {scored}", "anls", (".json", ".jsonl")),
        Line(family, "a benchmark", f"{model} --suite runs/suite.yaml --limit 8", "exact_match"),
    ]


def _checks(family: str, run: str, *engines: str) -> list[Line]:
    return [
        Line(family, f"for {engine}", f"check-folder {{{run}}} --for {engine}", "fits")
        for engine in engines
    ]


def _report(family: str, what: str, *runs: str, more: str = "") -> Line:
    named = " ".join(f"{{{run}}}" for run in runs)
    line = f"report {named} --output {{made}}{more}"
    return Line(family, what, line, "written", ("/report.html",))


def _shown(family: str, what: str, run: str) -> Line:
    line = f"show-data {{{run}}}/config.yaml --samples 2 --page {{made}}.html"
    return Line(family, what, line, r"\[\[", (".html",))


LINES = [
    *(line for family, run in _EACH for line in _evaluations(family, run)),
    Line(
        OCR, "metrics", f"evaluate {{ocr}} {_LINES_OF_TEXT}",
        r"text: \{answers: 4, cer: \d.*, ned: \d", (".json", ".jsonl"),
    ),
    Line(
        OCR, "a benchmark", "evaluate {ocr} --suite runs/suite_of_pages.yaml",
        r"\{answers: 8, cer: \d.*, ned: \d",
    ),
    Line(VL, "adapters", f"evaluate {{lora}} {_TEST}", _EXACT),
    Line(POLICY, "losses and errors of actions", f"evaluate {{arm}} {_HELD_OUT}", "(?i)mae"),
    Line(POLICY, "adapters", f"evaluate {{arm openpi}}/checkpoint-2 {_HELD_OUT}", "(?i)mae"),
    Line(PLANNER, "losses", f"evaluate {{planner}} {_HELD_OUT}", "CE"),
    *(Line(family, "an image", f"generate {{{run}}} {_ASK}", _WORD) for family, run in _EACH),
    Line(VL, "a video", f"generate {{packed}} --video {_FILM} --prompt What? {DRAWN}", _WORD),
    Line(OCR, "a task", f"generate {{ocr}} --image {_LINE} --task text {DRAWN}", _WORD),
    *_checks(VL, "packed", "vllm", "sglang", "fastdeploy", "transformers"),
    *_checks(MOE, "moe", "vllm", "sglang", "fastdeploy", "transformers"),
    *_checks(QWEN3_5, "3.5", "vllm", "sglang", "transformers"),
    *_checks(QWEN4_EXP, "4", "sglang", "transformers"),
    *_checks(OCR, "ocr", "paddlex", "vllm", "fastdeploy", "transformers"),
    Line(VL, "adapters for vllm", "check-folder {adapters} --for vllm", "fits"),
    _shown(VL, "conversations", "packed"),
    _shown(VL, "pairs of answers", "dpo"),
    _shown(VL, "packed documents", "mix"),
    Line(
        OCR, "pages with boxes",
        "show-data {ocr}/config.yaml data.train=[runs/documents/data/spotting_train.jsonl] "
        "--samples 2 --page {made}.html", r"\[\[.*LOC_\d", (".html",),
    ),
    _report(VL, "a run", "packed"),
    _report(VL, "runs side by side", "packed", "padded"),
    _report(VL, "seeds as one", "packed", "seeded", more=" --seeds --no-png"),
    _report(POLICY, "a run", "arm watched"),
    Line(
        VL, "token files",
        "tokenize runs/digits_corpus/text.jsonl --tokenizer runs/digits_corpus/processor "
        "--output {made}", made=(".bin", ".idx"),
    ),
    Line(
        VL, "rows of a file", "convert-data runs/digits/data/test.jsonl {made}.jsonl",
        made=(".jsonl",),
    ),
    Line(
        POLICY, "statistics of a dataset",
        "compute-stats {tests}/data/lerobot/v21_video --output {made}.json", made=(".json",),
    ),
    Line(
        VL, "times of a step",
        "profile {packed}/config.yaml --warmup 1 --steps 2 --json {made}.json",
        "forward", (".json",),
    ),
    Line(
        POLICY, "times of a step",
        f"profile {_ARM} --synthetic --warmup 1 --steps 2 train.output_dir={{made}}", "forward",
        way="sharding2 stage 2",
    ),
]  # fmt: skip
HEAVY_LINES = [
    *(
        Line(family, "ONNX", f"export {{{run}}} {{made}} --onnx", made=("/export.json",))
        for family, run in (
            *((VL, "packed"), (MOE, "moe"), (OCR, "ocr")),
            *((POLICY, "arm"), (PLANNER, "planner")),
        )
    ),
    *_evaluations(QWEN4_EXP, "4"),
    Line(QWEN4_EXP, "an image", f"generate {{4}} {_ASK}", _WORD),
    Line("all", "this machine", "doctor --quick"),
]
_ONE, _ACTIONS = "the answer of generate", "actions of the policy"
# By the test that compares them.
ANSWERS = {
    "chats": [
        Answers(command, family, _ONE, run)
        for family, run in (*_EACH, (OCR, "ocr"))
        for command in ("chat", "serve")
    ],
    "asked": [Answers("evaluate --endpoint", VL, "answers of the model", "packed")],
    "adapted": [
        Answers("merge", VL, "the answer of adapters", "lora"),
        Answers("merge", POLICY, "final/ of the run", "arm openpi"),
        Answers("serve --lora-modules", VL, "the answer of adapters", "adapters"),
    ],
    "exported": [
        Answers("export", VL, _ONE, "packed"),
        Answers("serve of an export", VL, _ONE, "packed"),
    ],
    "served": [
        Answers("serve-policy", POLICY, _ACTIONS, "arm"),
        Answers("serve-policy --protocol vla-eval", POLICY, _ACTIONS, "arm"),
    ],
    "precomputed": [
        Answers("precompute-reference", VL, "weights of a run that computes it", "dpo")
    ],
}
HEAVY_ANSWERS = {
    "chats": [Answers(command, QWEN4_EXP, _ONE, "4") for command in ("chat", "serve")],
    "adapted": [
        Answers("merge", OCR, "the answer of adapters", "ocr lora"),
        Answers("merge", QWEN4_EXP, "the answer of adapters", "4 lora"),
    ],
    "exported": [
        Answers("export", MOE, _ONE, "moe"),
        Answers("export", OCR, _ONE, "ocr"),
        Answers("serve of an export", OCR, _ONE, "ocr"),
    ],
    "served": [Answers("serve-policy of an export", POLICY, _ACTIONS, "arm")],
}
