"""What a step of a run sends at any number of ranks, without these ranks and without weights.

    python tools/simulate_scale.py run.yaml --ranks 512 parallel.mp_degree=8 ...

Runs the step of a rank of each pipeline stage in one process, with the run's own engine, topology,
layers and schedule, but little width (`tools/scale/counting.py`), and prints for the stage that
sends most what leaves a rank in a step; beside it the longest chain of calls that follow one
another, how long stages wait for each other, the memory that the weights' state takes, and what
the start costs. Calls that overlap with computation are in the chain too. Needs the settings and
the sizes of the model (a folder, a config.json or a published name), neither data nor weights;
of pi07 the tokenizers.
"""

import argparse
import json
import logging
import math
import os
import sys
from collections import Counter
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
MB, GB = 10**6, 10**9


def load(file: str, overrides: list[str]) -> Any:
    """The settings of a run; of a model folder that is not here its name says which size it has."""
    from paddle_vl.config.load import load_run_config

    config = load_run_config(file, overrides)
    if not (folder := config.model.pretrained) or Path(folder).exists():
        return config
    return load_run_config(file, [*overrides, f"model.pretrained={Path(folder).name}"])


def simulate(config: Any) -> dict[str, Any]:
    """Numbers of a run: `tools/simulate_scale.py --json`.

    Raises:
        ValueError: settings that contradict each other or the model, or that are not simulated.
    """
    from scale.chain import PASS, longest_chain
    from scale.counting import simulated

    parallel = config.parallel
    block = parallel.sharding_degree * parallel.mp_degree
    ranks = block * parallel.pp_degree * parallel.dp_degree
    # A process for each stage, forked here: Paddle's mode is that of the thread.
    with get_context("fork").Pool(parallel.pp_degree, maxtasksperchild=1) as pool:
        of_stage = [(config, stage * block) for stage in range(parallel.pp_degree)]
        stages = pool.starmap(simulated, of_stage, chunksize=1)
        pool.close()
        pool.join()
    of_stages = []
    for number, stage in enumerate(stages):
        sums: dict[tuple, Counter] = {}
        for call in (each for each in stage.calls if each.operation != PASS):
            found = sums.setdefault((call.kind, call.operation, len(call.ranks)), Counter())
            found.update(calls=call.pieces, contributed=call.num_bytes, sent=round(call.sent))
        of_stages.append(
            {
                "stage": number,
                "calls": [
                    {"kind": kind, "operation": operation, "group": size, **found}
                    for (kind, operation, size), found in sums.items()
                ],
                "sent": sum(found["sent"] for found in sums.values()),
                "memory": {name: round(size) for name, size in asdict(stage.memory).items()},
                "groups": stage.group_sizes,
                "start_collectives": stage.start_calls,
            }
        )
    has_passes = parallel.pp_degree > 1 and parallel.pp_schedule != "dualpipev"
    passes = [sum(call.time for call in stage.calls) for stage in stages if has_passes]
    time = longest_chain(stages, lambda call: call.time)
    return {
        "ranks": ranks,
        "token_rows": stages[0].rows,
        "stages": of_stages,
        "chain": round(longest_chain(stages, lambda call: call.pieces)),
        # The part of a step's passes that a stage waits; None where the backward pass is divided.
        "idle": 1 - max(passes) / time if passes else None,
        # Every rank receives the numbers of all, int64.
        "agree": {"values": stages[0].agreed, "received": 8 * stages[0].agreed * ranks},
    }


def shown(found: dict[str, Any]) -> str:
    """The numbers of the stage that sends most, as text."""
    stage = max(found["stages"], key=lambda each: each["sent"])
    lines = [f"{'a rank in a step':<42}{'group':>7}{'calls':>9}{'MB sent':>14}"]
    for each in sorted(stage["calls"], key=lambda each: -each["sent"]):
        name = f"{each['kind']}: {each['operation']}"
        sent = f"{each['sent'] / MB:,.3f}"
        lines.append(f"{name:<42}{each['group']:>7}{each['calls']:>9,}{sent:>14}")
    memories = [each["memory"] for each in found["stages"]]
    memory = max(memories, key=lambda each: sum(each.values()) - each["parameters"])
    parts = {name: size / GB for name, size in memory.items() if name != "parameters"}
    groups = stage["groups"]
    return "\n".join(
        [
            *lines,
            f"sent: {stage['sent'] / GB:.3f} GB by a rank of stage {stage['stage']}, with "
            f"{found['token_rows']:,} token rows a micro-batch",
            f"longest chain: {found['chain']:,} calls"
            + (f"; stages idle {found['idle']:.1%} of their passes" if found["idle"] else ""),
            f"memory: {sum(parts.values()):.1f} GB without activations ("
            + ", ".join(f"{name} {size:.1f}" for name, size in parts.items())
            + ")",
            f"start: {len(groups)} groups with {sum(groups) - len(groups):,} addresses of peers, "
            f"{stage['start_collectives']} collectives",
            f"agreement: {found['agree']['values']} numbers of every rank, "
            f"{found['agree']['received'] / 1000:,.1f} kB received",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", help="YAML of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.name=value", help="settings")
    parser.add_argument("--ranks", type=int, help="what the degrees must multiply to")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_intermixed_args()
    logging.disable(logging.INFO)
    try:
        config = load(options.config, options.overrides)
        names = ("dp_degree", "sharding_degree", "mp_degree", "pp_degree")
        degrees = {name: getattr(config.parallel, name) for name in names}
        if options.ranks not in (None, math.prod(degrees.values())):
            told = " x ".join(f"parallel.{name} {degree}" for name, degree in degrees.items())
            raise ValueError(
                f"--ranks is {options.ranks}, and {told} = {math.prod(degrees.values())}: set "
                "degrees whose product is the number of ranks"
            )
        found = simulate(config)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found) if options.json else shown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
