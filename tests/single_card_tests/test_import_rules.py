"""Import rules.

Guarantees: folders of the package import each other only in the allowed directions; Paddle stays
out of NumPy-only modules and paddle.distributed inside parallel/; importing the package loads
neither torch nor transformers; modules for loader workers load without Paddle.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paddle_vl

PACKAGE = Path(paddle_vl.__file__).parent
ALLOWED = {
    "files": set(),
    "config": {"files"},
    "batch": set(),
    "compat": set(),
    "threads": set(),
    "processes": set(),
    "nn": {"batch", "compat"},
    "checkpoint": {"nn", "config", "files", "compat"},
    "generation": {"files"},
    "data": {"batch", "config", "files", "threads"},
    # A family gets objects of the trainer and the parallel code as arguments.
    "families": {
        *("nn", "batch", "config", "compat", "files", "checkpoint", "generation", "data"),
        "threads",
    },
    # `writing` and the programs of families are for exporting; `load` imports no model code.
    "export": {
        *("families", "nn", "batch", "data", "generation"),
        *("checkpoint", "config", "files", "compat", "__init__"),
    },
    "parallel": {"nn", "batch", "config", "compat", "threads", "processes"},
    # For other frameworks, which it imports when asked; nothing here imports it.
    "integrations": {"batch"},
    "train": {
        *("families", "data", "parallel", "checkpoint", "nn", "batch", "config"),
        *("compat", "files", "threads", "processes"),
    },
    "profile": {
        *("train", "families", "data", "parallel", "nn", "batch", "config", "compat", "files"),
        "processes",
    },
    # A server gets no parts of a family but those in `SHARED` below.
    "serving": {
        "export",
        "families",
        "generation",
        "data",
        "config",
        "files",
        "threads",
        "processes",
    },
    "report": {"train", "data", "config", "files", "simulation"},
    # Environments, and policies that act in them; the simulator is imported when asked.
    "simulation": {"families", "files"},
    # For tests of a user's parallel code, and the doctor's; nothing else imports it.
    "testing": {"families", "parallel", "checkpoint", "nn", "batch", "config"},
    # Checks an installation with the parts that a run has, on tiny models of `testing`.
    "doctor": {
        *("testing", "profile", "train", "checkpoint", "parallel"),
        *("nn", "config", "compat", "files", "processes"),
    },
    "cli": {
        *("profile", "report", "train", "families", "generation", "checkpoint", "data", "export"),
        *("doctor", "serving", "simulation", "threads", "processes"),
        *("parallel", "nn", "batch", "config", "compat", "files"),
    },
    # Lazy imports of public names (and for type checkers); the command.
    "__init__": {"config", "families", "generation"},
    "__main__": {"cli"},
}
WITHOUT_PADDLE = ("files", "config", "batch", "data", "inputs", "policy", "templates")
FOREIGN = ("torch", "transformers", "lerobot", "paddlenlp", "paddleformers", "paddlefleet")


def modules() -> list[str]:
    return [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]


@functools.cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))))


@functools.cache
def imported_names(module: str) -> set[str]:
    """Dotted names that a file imports, at any level."""
    names = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def uses_distributed_attribute(module: str) -> bool:
    """Whether the code uses `paddle.distributed` without importing it."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "paddle"
        for node in nodes(module)
    )


def part(dotted_or_path: str) -> str:
    return dotted_or_path.removeprefix("paddle_vl.").replace("/", ".").split(".")[0]


def is_without_paddle(module: str) -> bool:
    """Whether a file runs in loader workers and uses NumPy only."""
    return bool({part(module), *module.split("/")[2:-1]} & set(WITHOUT_PADDLE))


def faults(module: str) -> Iterator[str]:
    own, names = part(module), imported_names(module)
    assert own in ALLOWED, f"{module}: say in ALLOWED what the new part may import"
    imported = {part(name) for name in names if name.startswith("paddle_vl.")}
    # `from paddle_vl import Name` uses a lazy name and would hide the imported folder.
    yield from sorted(imported - ALLOWED[own] - {own})
    yield from (name for name in names if name.split(".")[0] in FOREIGN)
    if is_without_paddle(module):
        yield from (name for name in names if name.split(".")[0] == "paddle")
    if own != "parallel":
        yield from (name for name in names if name.startswith("paddle.distributed"))
        if uses_distributed_attribute(module):
            yield "paddle.distributed"


def test_imports_follow_the_allowed_directions_and_paddle_stays_where_it_belongs():
    found = {module: list(faults(module)) for module in modules()}
    assert {module: names for module, names in found.items() if names} == {}


# What families may import besides themselves, and what these shared folders may import.
SHARED = {
    "vlm": set(),
    "policy": set(),
    "paddleocr_vl": {"vlm"},
    "qwen3_5": {"vlm"},
    "qwen4_exp": {"vlm"},
    "qwen3_vl": {"vlm"},
    "pi07": {"policy"},
    "serving": {"policy", "vlm"},
    "simulation": {"policy"},
}
BESIDE = {"adapter", "base", "flops", "hf_interface"}


def test_families_import_shared_folders_and_never_each_other():
    for module in modules():
        # The public names include models; a tiny one of each family is there for tests, and exports
        # know the model that they trace.
        if module == "__init__.py" or part(module) in ("testing", "export"):
            continue
        own = module.split("/")[1] if part(module) == "families" else part(module)
        imported = {
            name.split(".")[2]
            for name in imported_names(module)
            if name.startswith("paddle_vl.families.")
        }
        assert imported <= BESIDE | SHARED.get(own, set()) | {own}, module


def test_a_run_never_imports_the_testing_package():
    assert "testing" in ALLOWED
    assert [own for own, allowed in ALLOWED.items() if "testing" in allowed] == ["doctor"]
    assert [own for own, allowed in ALLOWED.items() if "doctor" in allowed] == ["cli"]


def loaded_by_importing(names: list[str]) -> set[str]:
    """Top-level packages loaded in a fresh process by importing the modules."""
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(' '.join({name.split('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def dotted(module: str) -> str:
    name = "paddle_vl." + module.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def test_whole_package_loads_without_torch_and_transformers():
    names = [dotted(module) for module in modules() if module != "__main__.py"]
    assert loaded_by_importing(names) & set(FOREIGN) == set()


def test_worker_parts_load_without_paddle():
    names = [dotted(module) for module in modules() if is_without_paddle(module)]
    assert "paddle" not in loaded_by_importing(names)


def test_no_modules_import_each_other():
    """At any level of a file, so that a reader can begin somewhere."""
    known = {dotted(module): module for module in modules()}
    imports = {
        name: {
            other if other in known else other.rpartition(".")[0]
            for other in imported_names(module)
        }
        & known.keys() - {name}
        for name, module in known.items()
    }
    # What imports nothing that is left is in no circle.
    left = dict(imports)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    while free := [
        name for name in left if not any(name in others for others in (left[n] for n in left))
    ]:
        for name in free:
            del left[name]
    assert sorted(left) == []
