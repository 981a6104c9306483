#!/usr/bin/env bash
# One expects a grammar of JSON to take any schema that pydantic writes: JSON Schema 2020-12 (section
# 7.2.1 of its validation part) makes `format` an annotation, and unknown ones are ignored.
# What happens: llguidance 1.9.1 knows ten formats and refuses a schema with another one, so pydantic
# 2.14's models with a Path, bytes, a UUID4 or a FilePath make no grammar. The option
# "x-guidance": {"lenient": true} takes them, and every other keyword that is not implemented too.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet llguidance==1.9.1 pydantic==2.14.4
"$work/venv/bin/python" - <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path
from uuid import UUID

from llguidance import LLMatcher
from pydantic import UUID4, BaseModel, FilePath

print("llguidance", version("llguidance"), "pydantic", version("pydantic"))
refused = []
for kind in (str, UUID, Path, bytes, UUID4, FilePath):
    model = type("Answer", (BaseModel,), {"__annotations__": {"value": kind}})
    schema = model.model_json_schema()
    name = schema["properties"]["value"].get("format")
    for options in ({}, {"lenient": True}):
        grammar = "start: %json " + json.dumps({**schema, "x-guidance": options})
        error = LLMatcher.validate_grammar(grammar)
        first = error.splitlines()[0] if error else "taken"
        print(f"format {name}, {options}: {first}")
        refused += [name] if error and not options else []
if refused != ["path", "binary", "uuid4", "file-path"]:
    sys.exit(f"the behaviour has changed: {refused} are refused")
PY
