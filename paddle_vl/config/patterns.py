"""Patterns over names: of parameters, of modules."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

# The parts of a Qwen3-VL that a setting may name, as patterns over HF parameter names.
PARTS: dict[str, tuple[str, ...]] = {
    "vision": ("model.visual.patch_embed.*", "model.visual.pos_embed.*", "model.visual.blocks.*"),
    "mergers": ("model.visual.merger.*", "model.visual.deepstack_merger_list.*"),
    "language": ("model.language_model.*", "lm_head.*"),
}

# The same for a policy, over the keys of its checkpoint.
_ENGINE = "model.gemma3_with_expert"
POLICY_PARTS: dict[str, tuple[str, ...]] = {
    "vision": (f"{_ENGINE}.gemma3.model.vision_tower.*",),
    "projector": (f"{_ENGINE}.gemma3.model.multi_modal_projector.*",),
    "backbone": (
        f"{_ENGINE}.gemma3.model.language_model.*",
        f"{_ENGINE}.interleaved_layers.*.backbone_layer.*",
    ),
    "expert": (
        f"{_ENGINE}.gemma_expert.*",
        f"{_ENGINE}.interleaved_layers.*.expert_layer.*",
        "model.action_in_proj.*",
        "model.action_out_proj.*",
        "model.time_mlp_*",
    ),
    "state": ("model.state_proj.*",),
    "discrete_actions": (f"{_ENGINE}.discrete_action_embedding.*", f"{_ENGINE}.da_head.*"),
}


def matching_names(
    patterns: Sequence[str],
    names: Iterable[str],
    setting: str,
    *,
    kind: str = "parameters",
    groups: Mapping[str, Sequence[str]] | None = None,
    by_suffix: bool = False,
) -> set[str]:
    """The names that at least one pattern (`*`, `?`, case counts) fits.

    Args:
        setting: where the patterns come from, for the message.
        kind: what the names are of, for the message.
        groups: words that may stand for several patterns.
        by_suffix: a pattern may also fit the end of a name, behind a dot.

    Raises:
        ValueError: a pattern that fits no name, with the nearest names.
    """
    names, groups = list(names), groups or {}
    matched: set[str] = set()
    for pattern in patterns:
        alternatives = list(groups.get(pattern, [pattern]))
        if by_suffix:
            alternatives += [f"*.{alternative}" for alternative in alternatives]
        fitting = {
            name for name in names if any(fnmatch.fnmatchcase(name, p) for p in alternatives)
        }
        if not fitting:
            raise ValueError(
                f"{setting}: the pattern {pattern!r} fits none of {len(names)} {kind}; the nearest "
                f"are {', '.join(_nearest(pattern, names, by_suffix))}"
            )
        matched |= fitting
    return matched


def _nearest(pattern: str, names: Sequence[str], by_suffix: bool) -> list[str]:
    """Three names like the pattern; where it may be an end of them, those with such an end."""
    depth = pattern.count(".") + 1
    ends: dict[str, str] = {}
    for name in names:
        ends.setdefault(".".join(name.split(".")[-depth:]) if by_suffix else name, name)
    close = difflib.get_close_matches(pattern, ends, n=3, cutoff=0.0)
    return [ends[end] for end in close]
