"""Writing an export of several tensor-parallel ranks, one after the other, in one process.

The folder has the programs that all ranks share, and a folder `rank_R` of each with a manifest of
its own. The answers of a rank's programs are those of the full model; at the end all ranks are
started on this machine and compare theirs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import paddle

from paddle_vl.export.folder import MANIFEST_FILE, ExportManifest, rank_folder
from paddle_vl.export.program import has_gpu
from paddle_vl.export.ranks import check_ranks
from paddle_vl.export.writing import ModelToExport, file_sums, new_folder, write_export


@dataclass(frozen=True)
class RanksToExport:
    """What a family gives for an export of ranks.

    Attributes:
        shared: programs that every rank runs alike, and the files of the folder.
        ranks: makes each rank's programs when it is asked for the next.
        sequence_parallel: whether the prefill keeps a shard of the token rows on each rank.
    """

    shared: ModelToExport
    ranks: Callable[[], Iterator[ModelToExport]]
    sequence_parallel: bool


def export_ranks(model: RanksToExport, size: int, source: Path, out: Path) -> ExportManifest:
    """Write the export; the folder gets its name when it is complete and all ranks have run.

    Returns:
        The manifest of the shared programs.

    Raises:
        ValueError: `out` exists and is not an empty folder.
        RuntimeError: a rank's answer differs from the model's.
    """
    with new_folder(out) as partial:
        manifest = write_export(model.shared, source, partial)
        names: list[str] = list(manifest.programs)
        for rank, programs in enumerate(model.ranks()):
            folder = rank_folder(partial, rank)
            folder.mkdir()
            own = replace(
                write_export(programs, source, folder), mp_degree=size, rank=rank,
                sequence_parallel=model.sequence_parallel,
            )  # fmt: skip
            own.write(folder)
            names += [name for name in own.programs if name not in names]
        # The other files of a rank are in its own manifest.
        sums = {
            name: one
            for name, one in file_sums(partial).items()
            if name.endswith(f"/{MANIFEST_FILE}") or ("/" not in name and name != MANIFEST_FILE)
        }
        manifest = replace(
            manifest, mp_degree=size, sequence_parallel=model.sequence_parallel, files=sums
        )
        manifest.write(partial)
        if not has_gpu() or paddle.device.cuda.device_count() >= size:
            check_ranks(partial, size, names)
    return manifest
