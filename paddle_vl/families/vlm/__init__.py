"""What vision-language families share: inputs, training objective, generation, adapters, stages."""
