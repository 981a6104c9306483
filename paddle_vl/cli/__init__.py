"""The `paddle-vl` command."""
