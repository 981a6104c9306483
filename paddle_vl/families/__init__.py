"""The model families, one folder each; `registry` knows their names."""
