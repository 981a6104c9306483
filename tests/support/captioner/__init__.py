"""A third family, outside of the package: the shared vision tower and a decoder of its own.

It shows what a family consists of, and that a new one needs no change of the package: importing
this module registers it.
"""

from paddle_vl.config.families import VLM_CAPABILITIES, FamilyEntry, register_family

register_family(
    FamilyEntry(
        "captioner",
        ("captioner",),
        "tests.support.captioner.recipe:CaptionerRun",
        "tests.support.captioner.recipe:CaptionerRecipe",
        "tests.support.captioner.model:Captioner",
        VLM_CAPABILITIES,
    )
)
