"""The network: configuration, tower, embedding, decoder, and the batch that it takes."""
