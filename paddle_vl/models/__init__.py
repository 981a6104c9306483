"""Models, written for one device; parallelism enters through the placement they are built with."""
