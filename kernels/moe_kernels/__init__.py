"""Kernels of a training step, each with a plain-torch reference. Imports without a GPU and without Triton."""
