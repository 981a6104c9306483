"""Evaluation: mean loss over a dataset, and exact answers by greedy decoding."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from paddle_vl.train.in_step import evaluated_in_step
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess
from paddle_vl.train.step import WholeModel

NO_TASK = "(no task)"


@dataclass(frozen=True)
class Answer:
    """A greedy answer beside the expected one.

    Attributes:
        sample: `file:line` of the conversation.
        task: its field `task`, `NO_TASK` without one.
        prompt: text of the turn that is answered.
        is_exact: whether answer and expected text are equal, outer spaces aside.
    """

    sample: str
    task: str
    prompt: str
    expected: str
    answer: str
    is_exact: bool


def mean_loss(
    runner: WholeModel, batches: Iterable[dict[str, Any]], processes: SingleProcess = ONE_PROCESS
) -> tuple[float, int]:
    """Mean cross entropy over all target tokens of all batches, and their number.

    Args:
        runner: the model, or this process's stages of it.
        batches: this process's part of them.
        processes: those that evaluate together; all of them call this together.

    Raises:
        ValueError: no batch has a target token.
    """
    total, count = paddle.zeros([], dtype="float64"), 0
    placement = runner.model.placement
    if placement.layers_are_collective:
        vision, length = runner.model.config.vision_config, placement.row_part.size
        batches = evaluated_in_step(batches, processes, vision, length)
    was_training = runner.model.training
    runner.model.eval()
    try:
        # A loader begins anew when it is asked behind its end; a chain does not.
        stream = chain(batches)
        while group := list(islice(stream, runner.batches_at_once)):
            total += runner.loss_sum(group).astype("float64")
            count += sum(batch["num_target_tokens"] for batch in group)
    finally:
        if was_training:
            runner.model.train()
    total = float(processes.sum_losses(total))
    (count,) = processes.totals([count])
    if count == 0:
        raise ValueError("the evaluation data has no target token: there is no loss to report")
    return total / count, count


def greedy_answers(
    model: nn.Layer,
    processor: Any,
    dataset: Any,
    *,
    batch_size: int,
    max_new_tokens: int,
) -> list[Answer]:
    """Answer every assistant turn anew, given the true turns before it.

    Args:
        processor: a `Qwen3VLProcessor`.
        dataset: a `MessagesDataset`.
        batch_size: turns that are answered together.
    """
    questions = _questions(dataset)
    # Whatever the model's own generation_config.json says.
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
        inputs = processor.encode_prompts([conversation for _, conversation, _ in group])
        new_ids = model.generate(**inputs, **greedy)
        for (sample, conversation, expected), ids in zip(group, new_ids, strict=True):
            answer = processor.decode(ids).strip()
            answers.append(
                Answer(
                    sample=sample,
                    task=str(conversation.extra.get("task", NO_TASK)),
                    prompt=conversation.turns[-1].text if conversation.turns else "",
                    expected=expected,
                    answer=answer,
                    is_exact=answer == expected,
                )
            )
    return answers


class FirstSamples:
    """The first samples of a dataset, as a dataset."""

    def __init__(self, dataset: Any, limit: int):
        self._dataset, self._limit = dataset, limit

    def __len__(self) -> int:
        return min(self._limit, len(self._dataset))

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._dataset[number]

    def __getattr__(self, name: str) -> Any:
        # A copy in a worker is asked for its state before it has a dataset.
        if name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _questions(dataset: Any) -> Iterator[tuple[str, Any, str]]:
    """Place, conversation up to an assistant turn, and the text of that turn."""
    for number in range(len(dataset)):
        conversation = dataset.conversation(number)
        for i, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                so_far = replace(conversation, turns=conversation.turns[:i])
                yield dataset.place(number), so_far, turn.text.strip()


def evaluation_report(loss: float, num_targets: int, answers: list[Answer]) -> str:
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


def shown_answers(answers: list[Answer], limit: int) -> str:
    """Up to `limit` answers, evenly spread over the data, a line each."""
    step = max(1, len(answers) // limit)
    lines = ["some answers:"]
    for answer in answers[::step][:limit]:
        verdict = "right" if answer.is_exact else f"expected {answer.expected!r}"
        lines.append(f"  {answer.sample}  {answer.prompt!r} -> {answer.answer!r}  ({verdict})")
    return "\n".join(lines)


def write_predictions(answers: list[Answer], path: Path) -> None:
    """Write one JSON line per answer."""
    with path.open("w", encoding="utf-8") as stream:
        for answer in answers:
            stream.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
