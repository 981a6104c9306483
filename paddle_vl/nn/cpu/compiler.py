"""Compile `SOURCES` with the machine's C compiler, once per user, and load them.

The library lies in the user's cache folder under a name made of the source, its flags, the
processor and Paddle's version, so a change of any of them compiles anew. It is written under
another name first and renamed, so several ranks may compile at once.

It is linked to the OpenMP runtime and the matrix product of Paddle's wheel and to no other: two
OpenMP runtimes in a process mix their symbols, every thread then runs all iterations of a loop, and
gradients are wrong without an error.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import paddle

_NAMES = ("kernels", "streams", "block_attention")
# One source: each sees what those before it define.
SOURCES = tuple(Path(__file__).with_name(f"{name}.c") for name in _NAMES)
COMPILERS = ("cc", "gcc", "clang")
# Not -ffast-math: its start-up code changes the rounding of the whole process.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
         "-fopenmp")  # fmt: skip
_LONGEST_S = 120.0


class CompilerError(RuntimeError):
    """The kernels cannot be compiled or loaded here; says why."""


def load_kernels() -> ctypes.CDLL:
    """The library, compiled if this user has none for this source and processor.

    Raises:
        CompilerError: no compiler, one that fails, or a library that does not load.
    """
    libraries = paddle_libraries()
    try:
        # They are needed under these names, and loaded by Paddle already.
        for library in libraries:
            ctypes.CDLL(str(library))
        try:
            file = cache_folder() / f"kernels-{_key(libraries)}.so"
            if not file.exists():
                _compile(libraries, file)
            return ctypes.CDLL(str(file))
        except PermissionError:
            with tempfile.TemporaryDirectory() as temporary:
                file = Path(temporary) / "kernels.so"
                _compile(libraries, file)
                return ctypes.CDLL(str(file))
    except OSError as error:
        raise CompilerError(str(error)) from error


def find_compiler() -> str:
    """Path of a C compiler: `CC` if set, else the first of `COMPILERS`.

    Raises:
        CompilerError: there is none.
    """
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise CompilerError(f"no C compiler ({', '.join(names)})")


def paddle_libraries() -> tuple[Path, Path]:
    """OpenMP runtime and math library of Paddle's wheel.

    Raises:
        CompilerError: this build of Paddle has other ones.
    """
    folder = Path(paddle.__file__).parent / "libs"
    libraries = folder / "libiomp5.so", folder / "libmklml_intel.so"
    for library in libraries:
        if not library.exists():
            raise CompilerError(f"this build of Paddle has no {library.name}")
    return libraries


def cache_folder() -> Path:
    """Folder for compiled kernels, `paddle_vl` in `XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        PermissionError: it cannot be made, is not this user's, or others may write into it.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle_vl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise PermissionError(f"{folder} cannot be made: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def _key(libraries: tuple[Path, Path]) -> str:
    parts = (" ".join(FLAGS), _processor(), paddle.__version__, str(libraries))
    content = b"".join(x.read_bytes() for x in SOURCES) + "\0".join(parts).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
    """Instructions of the processor, which `-march=native` depends on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name"))}))


def _compile(libraries: tuple[Path, Path], file: Path) -> None:
    """Compile into a file, which appears when it is complete."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".compile-") as folder:
        made, library = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        *before, last = map(str, SOURCES)
        included = [word for source in before for word in ("-include", source)]
        _run([compiler, *FLAGS, *included, "-c", last, "-o", str(made)])
        # Without -fopenmp, which would link the compiler's own OpenMP runtime.
        needed = [*map(str, libraries), "-lm"]
        _run([compiler, "-shared", str(made), "-o", str(library), "-Wl,-z,defs", *needed])
        with library.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(library, file)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CompilerError(f"{command[0]}: {lines[-1]}")
