"""Evaluation: mean loss over a dataset, and exact answers by greedy decoding."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

from paddle import nn

from paddle_vl.train.objective import Batch, no_terms, weighted
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


class MeanLosses(NamedTuple):
    """Losses over a dataset.

    Attributes:
        loss: the weighted sum of its terms.
        terms: by name the mean of each term.
        counts: by name of what each is the mean: for a language model target tokens.
    """

    loss: float
    terms: dict[str, float]
    counts: dict[str, int]


def mean_losses(
    runner: WholeModel,
    batches: Iterable[Batch],
    processes: SingleProcess = ONE_PROCESS,
    received: Callable[[], int | None] = lambda: None,
) -> MeanLosses | None:
    """Mean of each loss term over all batches; None where any rank received a stop signal.

    Args:
        runner: the model, or this process's stages of it.
        batches: this process's part of them.
        processes: those that evaluate together; all of them call this together.
        received: the stop signal that this rank received so far.

    Raises:
        ValueError: no batch has anything that a term is the mean of.
    """
    objective, model = runner.objective, runner.model
    sums, counts = no_terms(objective).astype("float64"), [0] * len(objective.terms)
    was_training = model.training
    model.eval()
    try:
        for group in _groups(batches, runner, processes, received):
            if group is None:
                return None
            sums += runner.loss_sums(group).astype("float64")
            for batch in group:
                counts = [a + b for a, b in zip(counts, objective.counts(batch), strict=True)]
    finally:
        if was_training:
            model.train()
    values = processes.sum_losses(sums).tolist()
    counts = processes.totals(counts)
    if not all(counts):
        raise ValueError("the evaluation data has no target token: there is no loss to report")
    means = [value / count for value, count in zip(values, counts, strict=True)]
    names = list(objective.terms)
    return MeanLosses(
        weighted(means, objective),
        dict(zip(names, means, strict=True)),
        dict(zip(names, counts, strict=True)),
    )


def _groups(
    batches: Iterable[Batch],
    runner: WholeModel,
    processes: SingleProcess,
    received: Callable[[], int | None],
) -> Iterator[list[Batch] | None]:
    """The batches, as many together as the runner takes; None where any rank received a stop
    signal. One message before each, on all ranks until the last of them is done."""
    size = runner.batches_at_once
    if runner.model.placement.ops.layers_are_collective:
        stream = in_step(batches, runner, processes, received)
        while group := list(islice(stream, size)):
            yield None if group[-1] is None else group
        return
    # A loader begins anew when it is asked behind its end; a chain does not.
    stream = chain(batches)
    while True:
        group = list(islice(stream, size))
        (num_left,), signal = processes.agree([len(group)], received())
        if signal is not None:
            yield None
        if num_left == 0 or signal is not None:
            return
        if group:
            yield group


def in_step(
    batches: Iterable[Batch],
    runner: WholeModel,
    processes: SingleProcess,
    received: Callable[[], int | None] = lambda: None,
) -> Iterator[Batch | None]:
    """As many batches as the process with the most has, each in step with those of the others;
    None, the last one, where any rank received a stop signal."""
    objective, idle = runner.objective, runner.objective.idle_batch(runner.model)
    for batch in chain(batches, repeat(None)):
        is_there = batch is not None
        own = batch if is_there else idle
        counts = [is_there, *map(int, objective.asks(own))]
        (left, *asked), signal = processes.agree(counts, received())
        if signal is not None:
            yield None
        if left == 0 or signal is not None:
            return
        yield objective.settled(own, asked, runner.model)


def greedy_answers(
    model: nn.Layer,
    processor: Any,
    dataset: Any,
    *,
    batch_size: int,
    max_new_tokens: int,
) -> list[Answer]:
    """Answer every assistant turn that is a target anew, given the true turns before it.

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
    """Place, conversation up to a turn that is a target, and the text of that turn."""
    for number in range(len(dataset)):
        conversation = dataset.conversation(number)
        for i in conversation.targets:
            so_far = replace(conversation, turns=conversation.turns[:i])
            yield dataset.place(number), so_far, conversation.turns[i].text.strip()


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
