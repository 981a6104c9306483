"""What a dense decoder layer of Qwen3-VL keeps of a token for its backward pass, by formula."""


def kept_bytes_per_token(
    what: str,
    width: int,
    inner: int,
    queries: int,
    keys: int,
    head: int,
    bytes_per_value: int,
    numbers_per_row: int,
) -> int:
    """Bytes per token and layer, without parameters and rotary tables.

    Args:
        what: a value of `train.recompute`.
        width: of a token row.
        inner: of the MLP.
        queries, keys: of all heads of the queries, and of the keys.
        head: width of a head.
        numbers_per_row: float32 statistics of a norm's row and of a head's softmax: 2 of the
            kernels in C, 1 of those of a GPU.
    """
    if what == "full":
        return width * bytes_per_value
    # Inputs of the two norms; of attention its product's input, queries and keys before their norms
    # and after rotation, values, and the output; of the MLP gate and up, and their product.
    values = {"norms": 2 * width, "products": 2 * width, "inner": inner}
    values |= {"attention": 3 * queries + 3 * keys, "mlp": 2 * inner}
    # Rows of norms and softmax.
    rows = {"norms": 2, "attention": (queries + keys) // head + queries // head}
    gone = {
        "none": (),
        "act": ("products", "inner"),
        "attention": ("products", "inner", "attention"),
        "mlp": ("products", "inner", "mlp"),
    }[what]
    num_values = sum(number for part, number in values.items() if part not in gone)
    num_rows = sum(number for part, number in rows.items() if part not in gone)
    return bytes_per_value * num_values + 4 * numbers_per_row * num_rows
