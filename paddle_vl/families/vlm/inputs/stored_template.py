"""The chat template that a checkpoint stores for other programs; the built-in one is used."""

import hashlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

from paddle_vl.families.vlm.inputs.tokenizer import JINJA_TEMPLATE
from paddle_vl.files.text_file import parse_json_object

# SHA-256 of templates that render as the built-in one, of what it renders at all; without white
# space around them. Ours, and the one of the published Qwen3-VL Instruct models.
_EQUAL_TEMPLATES = (
    hashlib.sha256(JINJA_TEMPLATE.strip().encode()).hexdigest(),
    "9d879ef91075acbfb2df7e441fd79d60bacfca989cf6d511d2af45c681e94f10",
)


def template_text(files: Mapping[str, str], directory: Path) -> tuple[str, str] | None:
    """The Jinja template, from whichever of HF's files has it, and the file's name.

    Args:
        files: texts by name.

    Raises:
        RuntimeError: a file is no JSON object.
    """
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"], "chat_template.jinja"
    for name in ("chat_template.json", "tokenizer_config.json"):
        what, remedy = "a tokenizer's settings", "fetch or save it again"
        values = parse_json_object(files.get(name, "{}"), directory / name, what, remedy)
        if text := values.get("chat_template"):
            return str(text), name
    return None


def warn_of_other_template(found: tuple[str, str] | None, directory: Path) -> None:
    """Warn if the checkpoint's own template, which is not used, may differ from this one."""
    if found is None:
        return
    text, name = found
    plain = text.replace("\r\n", "\n").strip().encode(errors="surrogatepass")
    if hashlib.sha256(plain).hexdigest() in _EQUAL_TEMPLATES:
        return
    differences = []
    if re.search(r"add_generation_prompt[^#]*assistant\\n<think>", text):
        differences.append("; it opens every answer with <think>")
    if "You are a helpful assistant" in text:
        differences.append("; it adds a default system message")
    warnings.warn(
        f"the chat template in {directory / name} is not used and is none that is known to equal "
        f"Qwen3-VL's plain template, which paddle_vl uses{''.join(differences)}: write into your "
        "messages what the model needs of it",
        stacklevel=3,
    )
