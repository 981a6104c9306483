"""Tolerances of the tests, each with its reason. Exact equality needs none and is preferred.

| name | value | relative to | compared | why not exact |
| --- | --- | --- | --- | --- |
| TOPOLOGY | 1e-5 | largest entry of a tensor | a topology with one device, float32 | sums run in \
another order: over ranks, micro-batches, shards of a product |
| SYMMETRY | 2e-5 | largest entry of a tensor | pi07 with optional parts left out on some ranks, \
with one device | as TOPOLOGY, through a deeper model and several micro-batches |
| BLOCK | 2e-6 | 1 and the entry itself | one layer with its formula written out, float32 | \
products and sums are fused differently |
"""

TOPOLOGY = 1e-5
SYMMETRY = 2e-5
BLOCK = 2e-6
