"""Pipeline parallelism on fleet's schedules."""
