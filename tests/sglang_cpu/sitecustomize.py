"""Lets SGLang start beside a CPU build of PyTorch; Python runs this where the folder is on its path.

torchvision's wheel is linked against CUDA, so its operators are missing and its import fails at the first of
them: two are declared here, without a body. SGLang also asks for pinned memory, which needs an accelerator.
"""

import importlib.abc
import sys


class DeclareBeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if not torch.cuda.is_available():
            global library  # operators live as long as their library
            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
            zeros = torch.zeros
            torch.zeros = lambda *shape, pin_memory=False, **options: zeros(*shape, **options)
        return None


sys.meta_path.insert(0, DeclareBeforeTorchvision())
