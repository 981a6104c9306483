"""A third model family, outside of the package: captions for the region features of an image.

It shows what a family consists of, and that the package needs no change for one: this line
registers it.
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
