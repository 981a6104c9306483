#!/usr/bin/env bash
# One folder, two chat templates. One would expect that AutoProcessor and AutoTokenizer of
# transformers write the same prompt for the same folder. With transformers 5.24.0 they differ:
# - chat_template.json beside chat_template.jinja: the processor takes the first, the tokenizer the
#   second, without a message;
# - a template in tokenizer_config.json alone: the tokenizer takes it, the processor says that it has
#   no chat template.
# A folder that older releases saved, and into which newer software writes a .jinja, is such a one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.1 pillow==12.0.0 jinja2==3.1.6
HF_HUB_OFFLINE=1 "$work/venv/bin/python" - "$work/model" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models
from transformers import (
    AutoProcessor, AutoTokenizer, CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast
)

folder = Path(sys.argv[1])
print("transformers", transformers.__version__)
words = models.WordLevel({"<unk>": 0, "<image>": 1, "Hi": 2}, unk_token="<unk>")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(words), unk_token="<unk>", extra_special_tokens=["<image>"]
)
LlavaProcessor(
    CLIPImageProcessorPil(), tokenizer, patch_size=14, vision_feature_select_strategy="default"
).save_pretrained(folder)


def prompt(kind):
    try:
        loaded = kind.from_pretrained(folder)
        return loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    except ValueError as error:
        return f"ValueError: {error}"


old, new, config = (
    folder / name for name in ("chat_template.json", "chat_template.jinja", "tokenizer_config.json")
)
old.write_text(json.dumps({"chat_template": "template of chat_template.json"}))
new.write_text("template of chat_template.jinja")
both = [prompt(kind) for kind in (AutoProcessor, AutoTokenizer)]
print("chat_template.json beside chat_template.jinja:", *both, sep="\n  ")
old.unlink()
new.unlink()
values = json.loads(config.read_text())
config.write_text(json.dumps(values | {"chat_template": "template of tokenizer_config.json"}))
alone = [prompt(kind) for kind in (AutoProcessor, AutoTokenizer)]
print("tokenizer_config.json alone:", *alone, sep="\n  ")
expected = both == ["template of chat_template.json", "template of chat_template.jinja"]
if not expected or not alone[0].startswith("ValueError") or "tokenizer_config" not in alone[1]:
    sys.exit("The behaviour changed: both classes may now agree.")
PYTHON
