"""Check the fleetrun lines of docs/pretraining.md, and write the table of what they need.

    python tools/pretraining_jobs.py --write-doc

Every line is parsed as the launcher and `tools/train.py` parse it: its settings must be valid, and
its degrees of parallelism must fit the model and multiply to its number of GPUs. A rank's memory
is computed for the published size in the name of `model.pretrained`:

    weights, gradients, AdamW   as `paddle_vl.train.memory_needed` computes them, from the decoder's
                                matrices divided by mp and everything else in full
    layer inputs                kept by full recomputation: 2 bytes x tokens x width x layers / mp
    loss                        10 bytes x the logits of a chunk, `CHUNK_LOGITS` or all, and the
                                head's gradient in float32: 4 bytes x vocabulary x width / mp

What a layer needs while it runs is not counted, nor are collectives in flight.
"""

import argparse
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.config.load import load_run_config
from paddle_vl.config.patterns import matching_names
from paddle_vl.families.qwen3_vl.recipe import model_shape
from paddle_vl.families.qwen3_vl.settings import PARTS, Qwen3VLRun
from paddle_vl.nn.operations import CHUNK_LOGITS
from paddle_vl.parallel.degrees import AXES, Plan, plan_problems
from paddle_vl.train.layout import parallel_degrees
from paddle_vl.train.memory_needed import GB, NeededMemory

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pretraining.md"
MARKS = ("<!-- begin jobs -->", "<!-- end jobs -->")
_LOGIT_BYTES, _HEAD_GRADIENT_BYTES = 10, 4
_HIDDEN_BYTES = 2
# A tied head has the embedding's.
_HEAD_NAMES = ("lm_head.weight", "model.language_model.embed_tokens.weight")


@dataclass(frozen=True)
class Job:
    """A fleetrun line.

    Attributes:
        gpus: on all machines.
        config: its settings, with the overrides of the line.
    """

    line: str
    gpus: int
    config: Qwen3VLRun

    @classmethod
    def of(cls, line: str) -> "Job":
        """Parse a line.

        Raises:
            ValueError: the line or its settings are wrong.
        """
        parser = argparse.ArgumentParser("fleetrun", exit_on_error=False)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--nproc_per_node", type=int, required=True)
        parser.add_argument("--master")
        parser.add_argument("--log_dir")
        parser.add_argument("script")
        parser.add_argument("config")
        parser.add_argument("overrides", nargs="*")
        options = parser.parse_args(shlex.split(line)[1:])
        config = load_run_config(ROOT / options.config, options.overrides)
        assert isinstance(config, Qwen3VLRun), "a configuration of Qwen3-VL"
        return cls(line, options.nnodes * options.nproc_per_node, config)

    @property
    def size(self) -> str:
        """The published size in the name of the model that it starts from."""
        found = re.search(r"qwen3[-_]vl[-_](\d+b)", (self.config.model.pretrained or "").lower())
        if found is None:
            raise ValueError(f"no published size in model.pretrained of: {self.line}")
        return f"qwen3-vl-{found[1]}"

    @property
    def tokens_per_step(self) -> int:
        """Places in the packed rows of a step."""
        parallel, train = self.config.parallel, self.config.train
        data_ranks = parallel.dp_degree * parallel.sharding_degree
        rows = data_ranks * train.per_device_train_batch_size * train.gradient_accumulation_steps
        return rows * self.row

    @property
    def row(self) -> int:
        """Tokens of a packed row."""
        return self.config.data.packing_length or self.config.data.max_length

    def problems(self) -> list[str]:
        """What is wrong with the degrees of parallelism."""
        shape = model_shape(Qwen3VLConfig.named(self.size))
        degrees, multiple = parallel_degrees(self.config), self.config.data.pad_to_multiple_of
        return plan_problems(Plan(degrees, self.gpus, shape, multiple))

    def memory(self) -> dict[str, float]:
        """GB of a rank by what they are for, see the top of this file."""
        config, mp = self.config, self.config.parallel.mp_degree
        text, parameters = _parameters(self.size)
        frozen = matching_names(
            config.model.freeze, [name for name, *_ in parameters], "model.freeze", groups=PARTS
        )
        own: list[Any] = [
            SimpleNamespace(
                shape=[size // mp if is_sharded else size],
                dtype=paddle.bfloat16,
                stop_gradient=name in frozen,
            )
            for name, size, is_sharded in parameters
        ]
        needed = NeededMemory.of(own, config.parallel)
        tokens = self.row * config.train.per_device_train_batch_size
        kept = _HIDDEN_BYTES * tokens * text.hidden_size * text.num_hidden_layers / mp
        vocab = text.vocab_size / mp
        loss = _LOGIT_BYTES * min(tokens * vocab, CHUNK_LOGITS)
        names = {name for name, *_ in parameters}
        head = next(name for name in _HEAD_NAMES if name in names)
        if head not in frozen:
            loss += _HEAD_GRADIENT_BYTES * vocab * text.hidden_size
        sizes = (needed.weights, needed.gradients, needed.optimizer, kept, loss)
        names = ("weights", "gradients", "AdamW", "layer inputs", "loss")
        return {name: size / GB for name, size in zip(names, sizes, strict=True)}


@cache
def _parameters(size: str):
    """Text configuration of a published size; key, elements and whether tensor parallelism divides
    it, of every parameter."""
    config = Qwen3VLConfig.named(size)
    model = Qwen3VLForConditionalGeneration.from_config(config, materialize=False)
    return config.text_config, [
        (key, math.prod(shape), len(shape) > 1 and ".visual." not in key)
        for key, shape in model.whole_shapes().items()
    ]


def jobs_of(page: str) -> Iterator[Job]:
    """The fleetrun lines in the code blocks of a page; a backslash continues a line."""
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("fleetrun "):
                yield Job.of(" ".join(line.split()))


def table_of(jobs: list[Job]) -> list[str]:
    """The lines of a Markdown table."""
    names = list(jobs[0].memory())
    heads = ("stage", "GPUs", "model", "degrees", "tokens per row", "per step", *names, "together")
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for job in jobs:
        parallel, memory = job.config.parallel, job.memory()
        degrees = [
            f"{axis} {getattr(parallel, f'{axis}_degree')}"
            for axis in AXES
            if getattr(parallel, f"{axis}_degree") > 1
        ]
        sizes = [*memory.values(), sum(memory.values())]
        cells = (
            Path(job.config.train.output_dir).name,
            str(job.gpus),
            job.size.removeprefix("qwen3-vl-").upper(),
            ", ".join(degrees) or "-",
            f"{job.row:,}",
            f"{job.tokens_per_step:,}",
            *(f"{size:.1f}" for size in sizes),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write-doc", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    jobs = list(jobs_of(page))
    problems = [f"{job.line}\n  {problem}" for job in jobs for problem in job.problems()]
    if problems:
        parser.exit(1, "\n".join(problems) + "\n")
    table = "\n".join(table_of(jobs))
    print(table)
    if options.write_doc:
        before, _, rest = page.partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        text = f"{before}{MARKS[0]}\n{table}\n\nGB (10^9 bytes) of a rank.\n{MARKS[1]}{after}"
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
