"""What tells the versions of PaddleOCR-VL apart: nothing in config.json does."""

# What opens an answer, and the limits of an image's pixels as published; 1.6 has those of 1.5.
HEADS = {"1.0": "Assistant: ", "1.5": "Assistant:\n"}
LIMITS = {"1.0": (147384, 2822400), "1.5": (112896, 1003520)}
NAMES = {"1.0": "1.0", "1.5": "1.5 and 1.6"}
# PaddleX's file, and the name in it by which it knows the model.
INFERENCE_FILE = "inference.yml"
PADDLEX_NAMES = {
    "1.0": "PaddleOCR-VL-0.9B",
    "1.5": "PaddleOCR-VL-1.5-0.9B",
    "1.6": "PaddleOCR-VL-1.6-0.9B",
}


def inference_settings(version: str | None) -> str:
    """The content of PaddleX's file for a version; for that of 1.5 where none is known."""
    return f"Global:\n  model_name: {PADDLEX_NAMES[version or '1.5']}\n"
