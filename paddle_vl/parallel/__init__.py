"""Everything that knows about ranks, and what goes through paddle.distributed."""
