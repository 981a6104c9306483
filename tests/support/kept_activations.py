"""What a dense decoder layer of Qwen3-VL keeps of a token for its backward pass, and what it
computes again, by formula."""

from typing import NamedTuple

CHOICES = ("none", "act", "attention", "mlp", "full")
# What is computed again, of the parts below.
_AGAIN = {
    "none": (),
    "act": ("first input", "second input", "inner"),
    "attention": ("first input", "second input", "inner", "attention"),
    "mlp": ("first input", "second input", "inner", "mlp"),
}


class DenseLayer(NamedTuple):
    """Sizes of a decoder layer.

    Attributes:
        width: of a token row.
        inner: of the MLP.
        queries, keys: of all heads of the queries, and of the keys.
        head: width of a head.
    """

    width: int
    inner: int
    queries: int
    keys: int
    head: int

    def kept_bytes(self, what: str, bytes_per_value: int, on_gpu: bool) -> int:
        """Bytes per token, without parameters and rotary tables.

        Args:
            what: a value of `train.recompute`.
            on_gpu: the kernels of a GPU, else those in C.
        """
        if what == "full":
            return self.width * bytes_per_value
        # What the norms read; the inputs of attention and MLP; of attention queries and keys before
        # their norms and after rotation, values, and the output; of the MLP gate and up, and their
        # product.
        values = {"norms": 2 * self.width, "first input": self.width, "second input": self.width}
        values |= {"attention": 3 * (self.queries + self.keys)}
        values |= {"mlp": 2 * self.inner, "inner": self.inner}
        # Rows of norms and of the softmax, with float32 statistics.
        rows = {"norms": 2, "attention": (2 * self.queries + self.keys) // self.head}
        again = set(_AGAIN[what])
        if on_gpu:
            # Of the kernel that adds and normalizes.
            again.discard("second input")
        num_values = sum(number for part, number in values.items() if part not in again)
        num_rows = sum(number for part, number in rows.items() if part not in again)
        return bytes_per_value * num_values + 4 * (1 if on_gpu else 2) * num_rows

    def flops_again(self, what: str) -> int:
        """Operations per token that run again, without those between pairs of tokens."""
        attention = 2 * self.width * (2 * self.queries + 2 * self.keys)
        mlp = 6 * self.width * self.inner
        return {"attention": attention, "mlp": mlp, "full": attention + mlp}.get(what, 0)


def documented_table() -> str:
    """The table of docs/memory.md."""
    models = {
        "2B": DenseLayer(2048, 6144, 2048, 1024, 128),
        "8B": DenseLayer(4096, 12288, 4096, 1024, 128),
    }
    lines = [
        "| `train.recompute` | kept bytes, 2B | 8B | MFLOP again, 2B | 8B |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for what in CHOICES:
        kept = [f"{layer.kept_bytes(what, 2, True):,}" for layer in models.values()]
        again = [f"{layer.flops_again(what) / 1e6:.0f}" for layer in models.values()]
        lines.append(f"| `{what}` | {' | '.join([*kept, *again])} |")
    return "\n".join(lines)
