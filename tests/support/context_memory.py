"""Memory of a rank under context parallelism by formula, for docs/context_parallel.md.

Qwen3-VL-8B in bfloat16 with full recomputation, sequence parallelism where mp is above 1, sharding
stage 3, one row a micro-batch, of which three quarters are visual tokens. Not in it: what the
tower's layers need while they run, copies, and the allocator's gaps.
"""

from typing import NamedTuple

WIDTH, INNER, LAYERS, QUERIES, KEYS, VOCABULARY = 4096, 12288, 36, 4096, 1024, 151936
HEAD = 128
TOWER_WIDTH, TOWER_LAYERS, TOWER_PARAMETERS, PATCH, LEVELS = 1152, 27, 576_000_000, 1536, 3
LAYER_PARAMETERS = 2 * WIDTH * (QUERIES + KEYS) + 3 * WIDTH * INNER
TABLE_PARAMETERS = VOCABULARY * WIDTH
# Logits that exist at once, see `paddle_vl.nn.head_loss`.
CHUNK = 1 << 27


class Job(NamedTuple):
    """A row of the table: tokens of a row of the batch, and degrees."""

    tokens: int
    cp: int
    mp: int
    sharding: int
    exchanges_heads: bool = False

    @property
    def gpus(self) -> int:
        return self.sharding * self.mp

    def bytes_by_part(self) -> dict[str, float]:
        tokens, cp, mp, sharding, exchanges_heads = self
        shards = cp * mp
        visual = 3 * tokens // 4
        decoder = LAYERS * LAYER_PARAMETERS + 2 * TABLE_PARAMETERS
        parameters = decoder / mp + TOWER_PARAMETERS
        # Of a slice: the inputs of attention and MLP, gathered over mp; of this rank's heads and
        # inner features queries and keys thrice, gate and up and their product; norms of its shard.
        # Encoded here, received, and its sections apart; without cp all rows on every mp rank.
        rows = 3 * visual / shards if cp > 1 or mp == 1 else 2 * visual
        of_slice = 2 * WIDTH + (3 * (QUERIES + KEYS) + 3 * INNER + 2 * WIDTH) / mp
        of_all = 2 * 2 * tokens * KEYS / mp
        if exchanges_heads or (cp > 1 and mp < KEYS // HEAD):
            # The output of attention before its return, or of halves of the heads.
            of_slice += QUERIES / mp
        if exchanges_heads:
            of_all = 2 * 2 * tokens * exchanged_keys(cp, mp) / mp / cp
        return {
            "state": (2 + 4 + 12) * parameters / sharding,
            # Two layers, and a table with its gradient.
            "unsharded": (2 * 2 * LAYER_PARAMETERS + 4 * TABLE_PARAMETERS) / mp,
            # Of the items that this rank encodes.
            "pixels": 4 * 4 * visual / shards * PATCH,
            "tower inputs": 2 * 4 * visual / shards * TOWER_WIDTH * TOWER_LAYERS,
            "visual rows": 2 * rows * (1 + LEVELS) * WIDTH,
            "layer inputs": 2 * tokens / shards * WIDTH * LAYERS,
            "a layer": 2 * tokens / cp * of_slice,
            "keys of all": of_all,
            "loss": 10 * CHUNK + 4 * TABLE_PARAMETERS / mp,
        }


def exchanged_keys(cp: int, mp: int) -> int:
    """Features of the keys of all ranks, of which each has a head or more."""
    return max(KEYS, HEAD * cp * mp)


JOBS = (
    Job(32_768, 1, 1, 8),
    Job(131_072, 4, 1, 8),
    Job(262_144, 8, 1, 8),
    Job(262_144, 8, 1, 8, True),
    Job(262_144, 4, 2, 4),
    Job(262_144, 1, 8, 1),
    Job(262_144, 8, 1, 64),
    Job(1_048_576, 8, 8, 8),
    Job(1_048_576, 64, 1, 64),
)


def documented_table() -> str:
    """GB of 10^9 bytes of a rank."""
    lines = [
        "| tokens | GPUs | cp | mp | attention | state | together |",
        f"|{' ---: |' * 4} --- | ---: | ---: |",
    ]
    for job in JOBS:
        parts = job.bytes_by_part()
        sizes = " | ".join(f"{each / 1e9:.0f}" for each in (parts["state"], sum(parts.values())))
        way = "ulysses" if job.exchanges_heads else "gather" if job.cp > 1 else ""
        lines.append(f"| {job.tokens:,} | {job.gpus} | {job.cp} | {job.mp} | {way} | {sizes} |")
    return "\n".join(lines)


def documented_traffic() -> str:
    """MB that a rank sends for a layer in one direction."""
    tokens = 131_072
    lines = ["| cp x mp | `gather`, MB | `ulysses`, MB |", "| --- | ---: | ---: |"]
    for cp, mp in ((2, 1), (4, 1), (8, 1), (16, 1), (4, 2), (8, 8), (64, 1)):
        features = [2.0 * KEYS]
        if QUERIES // HEAD // mp % cp == 0:
            features.append(2 * (QUERIES + exchanged_keys(cp, mp)) / cp)
        sent = [f"{2 * tokens * each / mp * (cp - 1) / cp / 1e6:,.0f}" for each in features]
        lines.append(f"| {cp} x {mp} | {' | '.join([*sent, '-'][:2])} |")
    return "\n".join(lines)
