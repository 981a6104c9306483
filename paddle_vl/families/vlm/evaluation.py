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
    questions = _questions(dataset)
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
            [each for _, each, _ in group], add_generation_prompt=True
        )
        new_ids = model.generate(**inputs, **greedy)
        for (sample, conversation, expected), ids in zip(group, new_ids, strict=True):
            answer = processor.decode(ids).strip()
            answers.append(
                Answer(
                    sample=sample,
                    task=str(conversation.extra.get("task", NO_TASK)),
                    prompt=conversation.text(-1) if conversation.messages else "",
                    expected=expected,
                    answer=answer,
                    is_exact=_conclusion(answer) == _conclusion(expected),
                    images=[
                        os.path.abspath(source)
                        for source in conversation.images
                        if isinstance(source, str | os.PathLike)
                    ],
                )
            )
    return answers


def _conclusion(answer: str) -> str:
    """What follows the reasoning of an answer."""
    return answer.rpartition("</think>")[2].strip()


def _questions(dataset: ConversationData) -> Iterator[tuple[str, Conversation, str]]:
    """`file:line`, the conversation up to a target turn, and the text of that turn."""
    for number in range(len(dataset)):
        conversation = dataset.conversation(number)
        for i in conversation.targets:
            answer = conversation.text(i).strip()
            yield (
                dataset.place(number),
                conversation.with_messages(conversation.messages[:i]),
                answer,
            )


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
