"""Import rules.

Guarantees: folders of the package import each other only in the allowed directions; Paddle stays
out of NumPy-only modules and paddle.distributed inside parallel/; importing the package loads
neither torch nor transformers; modules for loader workers load without Paddle.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_vl

PACKAGE = Path(paddle_vl.__file__).parent
ALLOWED = {
    "files": set(),
    "config": {"files"},
    "batch": set(),
    "compat": set(),
    "nn": {"batch", "compat"},
    "checkpoint": {"nn", "config", "files", "compat"},
    "generation": {"files"},
    "data": {"batch", "config", "files"},
    # A family gets objects of the trainer and the parallel code as arguments.
    "families": {
        *("nn", "batch", "config", "compat", "files", "checkpoint", "generation", "data"),
        "export",
    },
    # `writing` and the programs of families are for exporting; `load` imports no model code.
    "export": {"checkpoint", "config", "files", "compat", "__init__"},
    "parallel": {"nn", "batch", "config", "compat"},
    # For other frameworks, which it imports when asked; nothing here imports it.
    "integrations": {"batch"},
    "train": {
        *("families", "data", "parallel", "checkpoint", "nn", "batch", "config"),
        *("compat", "files"),
    },
    "profile": {"train", "families", "data", "parallel", "nn", "batch", "config", "compat"},
    "report": {"train", "config", "files"},
    # For tests of a user's parallel code, and the doctor's; nothing else imports it.
    "testing": {"families", "parallel", "checkpoint", "nn", "batch", "config"},
    # Checks an installation with the parts that a run has, on tiny models of `testing`.
    "doctor": {
        *("testing", "profile", "train", "families", "generation", "checkpoint", "parallel"),
        *("nn", "batch", "config", "compat", "files"),
    },
    "cli": {
        *("profile", "report", "train", "families", "generation", "checkpoint", "data", "export"),
        "doctor",
        *("parallel", "nn", "batch", "config", "compat", "files"),
    },
    # Lazy imports of public names (and for type checkers); the command.
    "__init__": {"config", "families", "generation"},
    "__main__": {"cli"},
}
WITHOUT_PADDLE = ("files", "config", "batch", "data", "inputs", "demonstrations")
FOREIGN = ("torch", "transformers", "lerobot", "paddlenlp", "paddleformers", "paddlefleet")


def modules() -> list[str]:
    return [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]


def imported_names(module: str) -> set[str]:
    """Dotted names that a file imports, at any level."""
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))):
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
        for node in ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8")))
    )


def part(dotted_or_path: str) -> str:
    return dotted_or_path.removeprefix("paddle_vl.").replace("/", ".").split(".")[0]


def is_without_paddle(module: str) -> bool:
    """Whether a file runs in loader workers and uses NumPy only."""
    return bool({part(module), *module.split("/")[2:-1]} & set(WITHOUT_PADDLE))


@pytest.mark.parametrize("module", modules())
def test_imports_follow_the_allowed_directions(module):
    own = part(module)
    assert own in ALLOWED, f"{module}: say in ALLOWED what the new part may import"
    imported = {part(name) for name in imported_names(module) if name.startswith("paddle_vl.")}
    # `from paddle_vl import Name` uses a lazy name and would hide the imported folder.
    assert imported <= ALLOWED[own] | {own}


@pytest.mark.parametrize("module", modules())
def test_paddle_and_its_distributed_part_stay_where_they_belong(module):
    names = imported_names(module)
    own = part(module)
    if is_without_paddle(module):
        assert not {name for name in names if name.split(".")[0] == "paddle"}
    if own != "parallel":
        assert not {name for name in names if name.startswith("paddle.distributed")}
        assert not uses_distributed_attribute(module)
    assert not {name for name in names if name.split(".")[0] in FOREIGN}


def test_families_are_reached_through_the_registry_alone():
    """No family imports another, and no other folder imports one; they share `families.base`."""
    shared = {"base", "flops"}
    for module in modules():
        if module == "__init__.py" or part(module) == "testing":
            # The public names include models, and a tiny one of each family is there for tests.
            continue
        own = module.split("/")[1] if part(module) == "families" else ""
        imported = {
            name.split(".")[2]
            for name in imported_names(module)
            if name.startswith("paddle_vl.families.")
        }
        assert imported <= shared | {own}, module


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
