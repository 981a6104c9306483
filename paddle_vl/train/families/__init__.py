"""What a run of each family of models is put together from."""
