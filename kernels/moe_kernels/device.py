"""Which tensors Triton works on; the rest takes the plain-torch formula. Every kernel asks here."""

from torch import Tensor


def takes_triton(x: Tensor) -> bool:
    """CUDA tensors. A test that interprets the kernels on CPU replaces this."""
    return x.is_cuda
