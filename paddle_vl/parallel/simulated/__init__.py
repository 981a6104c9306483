"""Ranks without processes: groups of one process, whose collectives are computed, for tests.

`paddle_vl.testing` is the way to use them.
"""
