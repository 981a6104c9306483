"""Evaluation of a model folder on data files: loss, and greedy answers compared with the data's."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from paddle_vl.checkpoint.adapter_files import folder_with
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import Evaluation, EvaluationOptions, MeanLosses
from paddle_vl.families.vlm.inputs.conversation import Conversation
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.model import VLForConditionalGeneration
from paddle_vl.families.vlm.objective import VLBatchAdapter, VLLoss
from paddle_vl.families.vlm.processor_fit import check_processor_fits, model_collator
from paddle_vl.families.vlm.settings import VLDataConfig

NO_TASK = "(no task)"


@dataclass(frozen=True)
class Answer:
    """A greedy answer beside the expected one.

    Attributes:
        sample: `file:line` of the conversation.
        task: its field `task`, `NO_TASK` without one.
        prompt: text of the turn that is answered.
        is_exact: whether answer and expected text are equal, outer spaces and reasoning aside.
        images: files of the images before the answer.
    """

    sample: str
    task: str
    prompt: str
    expected: str
    answer: str
    is_exact: bool
    images: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """Both answers in a line of text."""
        verdict = "right" if self.is_exact else f"expected {self.expected!r}"
        return f"  {self.sample}  {self.prompt!r} -> {self.answer!r}  ({verdict})"


@dataclass(frozen=True)
class Question:
    """A target turn of a conversation.

    Attributes:
        sample: `file:line` of the conversation.
        asked: the conversation up to that turn.
        expected: text of the turn.
        processor: of the sample.
    """

    sample: str
    asked: Conversation
    expected: str
    processor: VLProcessor


def build_evaluation(
    model_class: type[VLForConditionalGeneration], folder: Path, options: EvaluationOptions
) -> Evaluation:
    """A model with its own processor, and data files in which a bad sample is an error.

    Args:
        folder: model or adapter folder.

    Raises:
        ValueError, RuntimeError: the folder is not a model with its processor, or the data cannot
            be used.
    """
    processor = VLProcessor.from_pretrained(
        folder_with("tokenizer.json", folder, options.base),
        template_variables=options.chat_template_kwargs,
    )
    data = VLDataConfig(max_length=options.max_length)
    dataset = open_conversations(options.files, data, processor, seed=0)
    dataset.limit = options.limit
    model = model_class.from_pretrained(folder, base=options.base)
    check_processor_fits(model.config, processor)
    loader = PrefetchLoader(
        dataset,
        model_collator(
            processor,
            lists_real_rows=bool(getattr(model.config.text_config, "num_experts", 0)),
        ),
        options.batch_size,
        shuffle=False,
        drop_last=False,
        num_epochs=1,
    )

    def report(losses: MeanLosses) -> Iterator[str]:
        answers = greedy_answers(
            model,
            processor,
            dataset,
            batch_size=options.batch_size,
            max_new_tokens=options.max_new_tokens,
        )
        yield evaluation_report(losses.loss, losses.counts["loss"], answers)
        if options.show:
            # Evenly distributed over the data.
            some = answers[:: max(1, len(answers) // options.show)][: options.show]
            yield "\n".join(["some answers:", *(answer.line for answer in some)])
        if options.predictions:
            lines = (json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers)
            options.predictions.write_text("".join(lines), encoding="utf-8")
            yield f"answers written to {options.predictions}"

    return Evaluation(model, VLLoss(), VLBatchAdapter(), loader, report)


def greedy_answers(
    model: VLForConditionalGeneration,
    processor: VLProcessor,
    dataset: ConversationData,
    *,
    batch_size: int,
    max_new_tokens: int,
) -> list[Answer]:
    """A greedy answer to every assistant turn that is a target, given the data's turns before it.

    Args:
        batch_size: turns per batch.
    """
    questions = (each for number in range(len(dataset)) for each in questions_in(dataset, number))
    # Overrides the model's own generation_config.json.
    greedy = {
        "do_sample": False,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": processor.eos_token_ids,
        "pad_token_id": processor.pad_token_id,
    }
    answers = []
    while group := list(islice(questions, batch_size)):
        inputs = processor.encode_prompts(
            [each.asked for each in group], add_generation_prompt=True
        )
        new_ids = model.generate(**inputs, **greedy)
        pairs = zip(group, new_ids, strict=True)
        answers += [answer_to(question, processor.decode(ids)) for question, ids in pairs]
    return answers


def answer_to(question: Question, text: str) -> Answer:
    """A generated text beside the expected answer."""
    asked, answer = question.asked, text.strip()
    return Answer(
        sample=question.sample,
        task=str(asked.extra.get("task", NO_TASK)),
        prompt=asked.text(-1) if asked.messages else "",
        expected=question.expected,
        answer=answer,
        is_exact=_conclusion(answer) == _conclusion(question.expected),
        images=[
            os.path.abspath(source)
            for source in asked.images
            if isinstance(source, str | os.PathLike)
        ],
    )


def _conclusion(answer: str) -> str:
    """What follows the reasoning of an answer."""
    return answer.rpartition("</think>")[2].strip()


def questions_in(dataset: ConversationData, number: int) -> list[Question]:
    """The questions of a sample, one for each of its target turns.

    Raises:
        BadSampleError: the sample cannot be used.
    """
    whole, (processor, _) = dataset.conversation(number), dataset.limits(number)
    return [
        Question(
            dataset.place(number),
            whole.with_messages(whole.messages[:turn]),
            whole.text(turn).strip(),
            processor,
        )
        for turn in whole.targets
    ]


def evaluation_report(loss: float, num_targets: int, answers: Sequence[Answer]) -> str:
    """The numbers as a small table, exact answers by task."""
    by_task: dict[str, list[bool]] = {}
    for answer in answers:
        by_task.setdefault(answer.task, []).append(answer.is_exact)
    rows = sorted(by_task.items()) if len(by_task) > 1 else []
    rows.append(("all answers", [answer.is_exact for answer in answers]))
    width = max(len(name) for name, _ in rows)
    lines = [f"loss per answer token: {loss:.4f} ({num_targets} tokens)", "exact answers:"]
    for name, exact in rows:
        share = sum(exact) / len(exact)
        lines.append(f"  {name:{width}}  {share:7.2%}  ({sum(exact)} of {len(exact)})")
    return "\n".join(lines)
