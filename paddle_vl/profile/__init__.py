"""What a training step costs: time by phase, memory by process, and which choices fit a machine."""
