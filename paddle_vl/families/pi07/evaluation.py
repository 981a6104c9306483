"""The losses of a policy on demonstrations, outside of training."""

from collections.abc import Sequence
from pathlib import Path

from paddle_vl.families.pi07.settings import PI07Run
from paddle_vl.families.registry import is_policy, model_family
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.train.evaluate import MeanLosses, mean_losses
from paddle_vl.train.processes import ONE_PROCESS
from paddle_vl.train.step import WholeModel

__all__ = ["is_policy", "policy_losses", "policy_report"]


def policy_losses(folder: Path, files: Sequence[str], batch_size: int) -> MeanLosses:
    """Losses over all samples, nothing dropped; noise and times are the same at every call.

    Raises:
        ValueError, RuntimeError: the folder is not a policy, or the data cannot be used.
    """
    config = PI07Run(
        model={"pretrained": str(folder)},
        data={"train": list(files), "eval": list(files)},
        train={
            "output_dir": str(folder),
            "max_steps": 1,
            "per_device_eval_batch_size": batch_size,
        },
    )
    family, placement = model_family(config, None), SingleDevicePlacement()
    model = family.build_model(placement)
    model.fill_all()
    with family.eval_loader(placement, ONE_PROCESS) as batches:
        return mean_losses(WholeModel(model, ONE_PROCESS, family.objective), batches)


def policy_report(losses: MeanLosses) -> str:
    """What `paddle-vl evaluate` prints of a policy."""
    lines = [f"loss: {losses.loss:.4f}"]
    lines += [
        f"  {name}: {mean:.4f}  (mean of {losses.counts[name]} values)"
        for name, mean in losses.terms.items()
    ]
    return "\n".join(lines)
