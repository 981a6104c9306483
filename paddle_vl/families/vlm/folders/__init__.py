"""Model folders: names of tensors in files, loading, and checks of what a folder holds."""
