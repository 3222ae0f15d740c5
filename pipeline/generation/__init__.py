"""Text generation from native checkpoints: KV cache, sampling, batches of prompts."""
