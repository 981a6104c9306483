"""Model files: HF's safetensors and configuration, sharded writing, manifests."""
