"""Which rank holds what of a model, and what the ranks of each axis exchange."""
