"""The key-value store of a run, through which its ranks find each other and form groups."""
