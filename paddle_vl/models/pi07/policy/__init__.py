"""Around the pi07 model: from raw observations to its inputs, from its outputs to raw actions."""
