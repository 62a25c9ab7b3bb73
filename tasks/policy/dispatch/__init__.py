"""Tokens to the ranks that own their experts and back: all-to-all, DeepEP, NVLink."""
