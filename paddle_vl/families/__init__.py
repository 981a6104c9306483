"""The model families, one folder each, and what they have in common: the protocol `base.Family`."""
