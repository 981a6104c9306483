"""Pipeline parallelism: the layers of one model over several processes."""
