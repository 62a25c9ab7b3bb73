"""Names that SGLang imports on a CPU for speculative decoding and cache moves; nothing here calls them.

The compiled CPU build of sgl-kernel is in no package index. On an x86 CPU SGLang computes with plain PyTorch
and needs these names only at import.
"""

_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def __getattr__(name):
    if name not in _NAMES:
        raise AttributeError(name)

    def absent(*arguments, **named):
        raise NotImplementedError(f"sgl_kernel.{name} is compiled code that this environment does not have")

    return absent
