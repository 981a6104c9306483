"""Parallelism: topology, collectives, tensor, pipeline and expert parallelism, sharding."""
