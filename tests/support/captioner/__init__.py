"""A third model family, outside of the package: captions for the region features of an image.

It shows what a family consists of, and that a new family needs no change of the package: importing
this module registers it.
"""

from paddle_vl.config.families import FamilyEntry, register_family

register_family(
    FamilyEntry(
        "captioner",
        ("captioner",),
        "tests.support.captioner.settings:CaptionerRun",
        "tests.support.captioner.recipe:CaptionerRecipe",
    )
)
