"""Evaluation of a model folder on data files or a benchmark: losses, and the scores of answers."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paddle_vl.checkpoint.adapter_files import folder_with
from paddle_vl.config.families import FamilyEntry
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.data.media_file import brief
from paddle_vl.families.base import Evaluation, EvaluationOptions, MeanLosses
from paddle_vl.families.vlm.evaluation.metrics import Scored, conclusion, metric_named
from paddle_vl.families.vlm.evaluation.suite import open_suite, read_suite
from paddle_vl.families.vlm.folders.processor_fit import check_processor_fits, model_collator
from paddle_vl.families.vlm.inputs.collate import PreparedCollator
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.families.vlm.settings import VLDataConfig
from paddle_vl.families.vlm.training.objective import VLBatchAdapter, VLLoss
from paddle_vl.files.text_file import write_text
from paddle_vl.generation.config import GenerationConfig

NO_TASK = "(no task)"
ALL_ANSWERS, COUNT = "all answers", "answers"


class Asked(NamedTuple):
    """What scoring needs of a question.

    Attributes:
        references: right answers, the text of the turn first.
        columns: the row's other values.
        groups: the row's `task`, of a benchmark one for each column of its `groups`.
        metrics: names of those that the row's source asks for.
        source: the name of the row's source, if it has one.
    """

    references: Sequence[str] = ()
    columns: Mapping[str, Any] = {}
    groups: Sequence[str] = ()
    metrics: Sequence[str] = ()
    source: str | None = None


@dataclass(frozen=True)
class Answer:
    """A generated answer beside the expected one.

    Attributes:
        sample: `file:line` of the conversation.
        task: its field `task`, `NO_TASK` without one.
        prompt: text of the turn that is answered.
        is_exact: whether answer and expected text are equal, outer spaces and reasoning aside; of
            several right answers, one of them.
        images: files of the images before the answer.
        scores: numbers by name, after scoring.
    """

    sample: str
    task: str
    prompt: str
    expected: str
    answer: str
    is_exact: bool
    images: list[str] = field(default_factory=list)
    asked: Asked = field(default_factory=Asked)
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Both answers in a line of text."""
        verdict = "right" if self.is_exact else f"expected {self.expected!r}"
        return f"  {self.sample}  {self.prompt!r} -> {self.answer!r}  ({verdict})"

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as a line of a file of predictions."""
        values = {name: value for name, value in vars(self).items() if name != "asked"}
        if not values["scores"]:
            del values["scores"]
        several = {"references": [*self.asked.references]} if self.asked.references[1:] else {}
        return values | several


@dataclass(frozen=True)
class Question:
    """A target turn of a conversation.

    Attributes:
        sample: `file:line` of the conversation.
        prompt: the conversation up to that turn.
        processor: of the sample.
        asked: what scoring needs.
    """

    sample: str
    prompt: Conversation
    processor: VLProcessor
    asked: Asked


def build_evaluation(family: FamilyEntry, folder: Path, options: EvaluationOptions) -> Evaluation:
    """A model with its own processor, and data files or a benchmark in which a bad sample is an
    error. A benchmark has no losses.

    Args:
        folder: model or adapter folder.

    Raises:
        ValueError, RuntimeError: the folder is not a model with its processor, or the data or the
            metrics cannot be used.
    """
    model_class = family.model_class()
    suite = None if options.suite is None else read_suite(options.suite)
    given = {} if suite is None else suite.model_dump(exclude_defaults=True)
    names = given.get("metrics") or options.metrics or ["exact_match"]
    scorer = Scorer(names, conclusion if suite is None else suite.scored_part)
    processor = VLProcessor.from_pretrained(
        folder_with("tokenizer.json", folder, options.base),
        template_variables=options.chat_template_kwargs,
        min_pixels=given.get("min_pixels"),
        max_pixels=given.get("max_pixels"),
        model_type=model_class.model_type,
    )
    if suite is None:
        data = VLDataConfig(max_length=options.max_length, checks=[])
        dataset = open_conversations(options.files, data, processor, seed=0)
    else:
        dataset = open_suite(suite, processor)
    dataset.limit = options.limit
    # Not where it may take long: a benchmark's rows hold their images, and functions are a user's.
    takes_long = suite is not None or any(".py:" in name for name in names)
    checked = range(1 if takes_long else len(dataset))
    scorer.check(each for number in checked for each in questions_in(dataset, number))
    model = model_class.from_pretrained(folder, base=options.base)
    check_processor_fits(model.config, processor)
    loader = None
    if suite is None:
        lists_real_rows = bool(getattr(model.config.text_config, "num_experts", 0))
        collator = model_collator(processor, lists_real_rows=lists_real_rows)
        prepared = PreparedCollator(collator, model.config.vision_config)
        loader = PrefetchLoader(
            dataset, prepared, options.batch_size, shuffle=False, drop_last=False, num_epochs=1
        )
    # Overrides the model's own generation_config.json.
    overrides = {
        "do_sample": False,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": options.max_new_tokens,
        "eos_token_id": processor.eos_token_ids,
        "pad_token_id": processor.pad_token_id,
        **given.get("generation", {}),
    }
    generation = asdict((model.generation_config or GenerationConfig()).updated(**overrides))
    settings = {
        "model": str(folder),
        **({"data": [*options.files]} if suite is None else {"suite": str(options.suite)}),
        **given,
        "metrics": [*names],
        "min_pixels": processor.image_processor.min_pixels,
        "max_pixels": processor.image_processor.max_pixels,
        "generation": generation,
        "chat_template_kwargs": {**options.chat_template_kwargs},
        "limit": options.limit,
        "batch_size": options.batch_size,
    }

    def report(losses: MeanLosses | None) -> Iterator[str]:
        answers = generated_answers(model, processor, dataset, options.batch_size, generation)
        if losses is not None:
            yield f"loss per answer token: {losses.loss:.4f} ({losses.counts['loss']} tokens)"
        yield from told_scores(answers, scorer, settings, options)

    return Evaluation(model, VLLoss(), VLBatchAdapter(), loader, report)


def told_scores(
    answers: Sequence[Answer],
    scorer: "Scorer",
    settings: Mapping[str, Any],
    options: EvaluationOptions,
) -> Iterator[str]:
    """Score answers, write what is to be written, and tell it."""
    scores, scored = scorer(answers)
    content = {"scores": scores, "settings": settings}
    if options.metrics or options.suite is not None:
        answers = scored
        # One line for each group.
        form = {"sort_keys": False, "allow_unicode": True, "default_flow_style": None}
        yield yaml.safe_dump(content, width=1 << 20, **form).rstrip()
    else:
        yield exact_report(answers)
    if options.show:
        # Evenly distributed over the data.
        some = answers[:: max(1, len(answers) // options.show)][: options.show]
        yield "\n".join(["some answers:", *(answer.line for answer in some)])
    if options.predictions:
        lines = (json.dumps(each.to_dict(), ensure_ascii=False) + "\n" for each in answers)
        write_text(options.predictions, "".join(lines))
        yield f"answers written to {options.predictions}"
    if options.json:
        text = json.dumps(content, ensure_ascii=False, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
        yield f"scores written to {options.json}"


def generated_answers(
    model: VLForConditionalGeneration,
    processor: VLProcessor,
    dataset: ConversationData,
    batch_size: int,
    generation: Mapping[str, Any],
) -> list[Answer]:
    """An answer to every assistant turn that is a target, given the data's turns before it.

    Args:
        batch_size: turns per batch.
        generation: settings of `GenerationConfig`.
    """
    questions = (each for number in range(len(dataset)) for each in questions_in(dataset, number))
    answers = []
    while group := list(islice(questions, batch_size)):
        prompts = [each.prompt for each in group]
        inputs = processor.encode_prompts(prompts, add_generation_prompt=True)
        new_ids = model.generate(**inputs, **generation)
        pairs = zip(group, new_ids, strict=True)
        answers += [answer_to(question, processor.decode(ids)) for question, ids in pairs]
    return answers


def answer_to(question: Question, text: str) -> Answer:
    """A generated text beside the expected answer."""
    prompt, answer, references = question.prompt, text.strip(), question.asked.references
    return Answer(
        sample=question.sample,
        task=", ".join(question.asked.groups),
        prompt=prompt.text(-1) if prompt.messages else "",
        expected=references[0],
        answer=answer,
        is_exact=conclusion(answer) in map(conclusion, references),
        images=[
            os.path.abspath(source)
            for source in prompt.images
            if isinstance(source, str | os.PathLike)
        ],
        asked=question.asked,
    )


def expected_answer(question: Question) -> Answer:
    """The first reference as if it were the answer."""
    return answer_to(question, question.asked.references[0])


class Scorer:
    """Scores answers, each with the metrics of its row's source.

    Args:
        names: metrics of rows whose source names none.
        extract: gives an answer's part that is scored.

    Raises:
        ValueError: see `metric_named`.
    """

    def __init__(self, names: Sequence[str], extract: Callable[[str], str] = conclusion):
        self._names, self._extract = names, extract
        self._metrics = {name: metric_named(name) for name in names}

    def check(self, questions: Iterable[Question]) -> list[str]:
        """The names of the scores, from scoring references as if they were the answers.

        Raises:
            ValueError: there is no such metric, or it cannot use a question.
        """
        return [*self.overall([*map(expected_answer, questions)])[0]]

    def overall(self, answers: Sequence[Answer]) -> tuple[dict[str, float], list[Answer]]:
        """Scores of all answers by name, and the answers with their own; see `__call__`."""
        scores, answers = self._of_groups({"": [*range(len(answers))]}, answers)
        return scores[""], answers

    def by_source(self, answers: Sequence[Answer]) -> tuple[dict[str, float], list[Answer]]:
        """The same, with scores of the answers to each named source as `NAME/SOURCE`."""
        groups: dict[str, list[int]] = {"": [*range(len(answers))]}
        for place, answer in enumerate(answers):
            if answer.asked.source is not None:
                groups.setdefault(f"/{answer.asked.source}", []).append(place)
        scores, answers = self._of_groups(groups, answers)
        return {n + group: v for group, of in scores.items() for n, v in of.items()}, answers

    def __call__(
        self, answers: Sequence[Answer]
    ) -> tuple[dict[str, dict[str, float]], list[Answer]]:
        """Scores by name, of `ALL_ANSWERS` and of each group's with their `COUNT`; and the answers
        with their own. A metric is called once for each answer, or for each set.

        Raises:
            ValueError: see `metric_named`.
        """
        groups = {ALL_ANSWERS: [*range(len(answers))]}
        for place, answer in enumerate(answers):
            for name in dict.fromkeys(answer.asked.groups):
                groups.setdefault(name, []).append(place)
        groups.pop(NO_TASK, None)
        scores, answers = self._of_groups(groups, answers)
        return {name: {COUNT: len(groups[name]), **of} for name, of in scores.items()}, answers

    def _of_groups(
        self, groups: Mapping[str, Sequence[int]], answers: Sequence[Answer]
    ) -> tuple[dict[str, dict[str, float]], list[Answer]]:
        """Scores of groups of answers, by their places; and the answers with their own."""
        scores: dict[str, dict[str, float]] = {name: {} for name in groups}
        own = [dict[str, float]() for _ in answers]
        samples = [
            Scored(self._extract(text), [*map(conclusion, asked.references)], asked.columns)
            for text, asked in ((each.answer, each.asked) for each in answers)
        ]
        names = [each.asked.metrics or self._names for each in answers]
        for name in dict.fromkeys(chain.from_iterable(names)):
            if name not in self._metrics:
                self._metrics[name] = metric_named(name)
            metric = self._metrics[name]
            found = {}
            for place, sample in enumerate(samples):
                if name in names[place]:
                    try:
                        found[place] = metric.own(sample)
                    except ValueError as error:
                        place_of = f"{answers[place].sample}: metric {name}"
                        raise ValueError(f"{place_of}: {error}") from error
            for place, numbers in found.items():
                own[place] |= numbers
            for group, places in groups.items():
                if inside := [place for place in places if place in found]:
                    set_of = [samples[place] for place in inside]
                    scores[group] |= metric.score(set_of, [found[place] for place in inside])
        return scores, [replace(a, scores=n) for a, n in zip(answers, own, strict=True)]


def questions_in(dataset: ConversationData, number: int) -> list[Question]:
    """The questions of a sample, one for each of its target turns.

    Raises:
        BadSampleError: the sample cannot be used.
        ValueError: its `references` are no texts, or of several questions.
    """
    row, whole = dataset.row_of(number), dataset.conversation(number)
    more, task = whole.extras.get("references") or [], whole.extras.get("task", NO_TASK)
    is_texts = isinstance(more, list) and all(isinstance(each, str) for each in more)
    if more and (not is_texts or len(whole.targets) > 1):
        raise ValueError(
            f"{dataset.place(number)} has the references {brief(more)!r} for {len(whole.targets)} "
            "answers: they must be a list of texts, in a row of one answer"
        )
    return [
        Question(
            dataset.place(number),
            whole.with_messages(whole.messages[:turn]),
            dataset.limits(row)[0],
            Asked(
                list(dict.fromkeys([whole.text(turn).strip(), *more])),
                whole.columns,
                [*map(str, task if isinstance(task, list) else [task])],
                dataset.metrics(row),
                dataset.source_name(row),
            ),
        )
        for turn in whole.targets
    ]


def exact_report(answers: Sequence[Answer]) -> str:
    """A small table of exact answers by task."""
    by_task: dict[str, list[bool]] = {}
    for answer in answers:
        by_task.setdefault(answer.task, []).append(answer.is_exact)
    rows = sorted(by_task.items()) if len(by_task) > 1 else []
    rows.append((ALL_ANSWERS, [answer.is_exact for answer in answers]))
    width = max(len(name) for name, _ in rows)
    lines = ["exact answers:"]
    for name, exact in rows:
        share = sum(exact) / len(exact)
        lines.append(f"  {name:{width}}  {share:7.2%}  ({sum(exact)} of {len(exact)})")
    return "\n".join(lines)
