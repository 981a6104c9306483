"""What a training step asks of a family: loss, pipeline stages, adapters, own pixels, colocated."""
