"""A Hugging Face model as the trainer runs it: loading, fused parts, recomputation, routers, its text."""
