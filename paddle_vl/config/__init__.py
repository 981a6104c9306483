"""The settings of a run: their schema, reading a YAML file, and the rules across settings."""
