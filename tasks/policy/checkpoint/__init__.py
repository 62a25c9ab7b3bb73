"""Weights and optimizer state from live tensors to stored shards, and back."""
