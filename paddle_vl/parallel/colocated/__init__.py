"""The colocated schedule: the encoder on all ranks, around the language model's pipeline.

A step has three phases: every rank takes part in one encoder forward over the items of all
micro-batches; the language model runs its pipeline over detached slices of the rows; every rank
takes part in one encoder backward.
"""
