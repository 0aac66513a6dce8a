"""Which operations on a sharded tensor are alike; what is done about each kind is in operations.py."""

from __future__ import annotations

import torch

_T = torch.Tensor


_METADATA_NAMES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "names", "itemsize"),
    *("nbytes", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_sparse_csr", "is_mkldnn"),
    *("is_quantized", "is_nested", "is_vulkan", "is_ipu", "is_xla", "is_maia", "is_mtia", "retains_grad"),
    *("output_nr", "grad_dtype", "_version", "_backward_hooks", "_base", "name"),
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "get_device", "is_shared"),
    *("__len__", "__hash__", "_is_view", "is_distributed", "dim_order", "is_same_size", "is_pinned"),
)
_found = [getattr(_T, name) for name in _METADATA_NAMES if hasattr(_T, name)]  # not every torch has all of them
METADATA = {one if callable(one) else one.__get__ for one in _found}  # a method, or what reads an attribute
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, torch.is_same_size}

# New tensors in the likeness of another: only its shape, dtype and device matter.
LIKE = {
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
    *(torch.randint_like, _T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor),
}

ELEMENTWISE = {
    *("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "copy_", "zero_", "fill_", "neg_", "abs_"),
    *("clamp_", "clamp_min_", "clamp_max_", "clip_", "sqrt_", "rsqrt_", "pow_", "exp_", "sign_", "round_"),
    *("nan_to_num_", "reciprocal_", "square_", "tanh_", "sigmoid_", "relu_", "true_divide_", "multiply_", "divide_"),
    *("subtract_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "masked_fill_"),
}

# What draws random numbers: in one process there is one draw.
RANDOM = {
    *("normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"),
    *("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_", "rrelu_"),
}
