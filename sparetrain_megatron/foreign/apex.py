"""The kernels of NVIDIA's Apex that Megatron calls, each family in an extension module of its own.

Compared with Apex's sources as of July 2026 (commit 6424da3: ``csrc/amp_C_frontend.cpp``,
``csrc/layer_norm_cuda.cpp``, ``csrc/megatron``, ``apex/contrib/csrc/layer_norm/ln_api.cpp``); none
of them has been run here.
"""

from __future__ import annotations

from .table import Library, read

_TABLES = {
    "amp_C": """
        multi_tensor_l2norm: chunk_size noop_flag! tensor_lists per_tensor
        multi_tensor_unscale_l2norm: chunk_size noop_flag! tensor_lists inv_scale per_tensor
        multi_tensor_scale: chunk_size noop_flag! tensor_lists! scale ; itemwise tensor_lists
        multi_tensor_adam: chunk_size noop_flag! tensor_lists!1 lr beta1 beta2 epsilon step mode bias_correction weight_decay ; itemwise tensor_lists
        multi_tensor_adam_capturable multi_tensor_adam_capturable_master: chunk_size noop_flag! tensor_lists! lr beta1 beta2 epsilon step mode bias_correction weight_decay inv_scale ; itemwise tensor_lists
        multi_tensor_sgd: chunk_size noop_flag! tensor_lists! wd momentum dampening lr nesterov first_run wd_after_momentum scale ; itemwise tensor_lists
    """,  # noqa: E501
    # The gradient is added to the main gradient, the last argument.
    "fused_weight_gradient_mlp_cuda": """
        wgrad_gemm_accum_fp32 wgrad_gemm_accum_fp16: input d_output d_weight!
    """,
    "fused_layer_norm_cuda": """
        forward rms_forward: input normalized_shape eps
        forward_affine forward_affine_mixed_dtypes: input normalized_shape gamma beta eps
        rms_forward_affine rms_forward_affine_mixed_dtypes: input normalized_shape gamma eps
        backward: dout mean invvar input normalized_shape eps memory_efficient
        backward_affine: dout mean invvar input normalized_shape gamma beta eps memory_efficient
        rms_backward: dout invvar input normalized_shape eps memory_efficient
        rms_backward_affine: dout invvar input normalized_shape gamma eps memory_efficient
    """,
    "fast_layer_norm": """
        ln_fwd: x gamma beta epsilon
        ln_bwd: dz x mu rsigma gamma beta memory_efficient
    """,
    # The backward writes over the gradient that it is given (the masked one: until 2022).
    "scaled_softmax_cuda": """
        forward: input scale_factor
        backward: output_grads! softmax_results scale_factor
    """,
    "scaled_upper_triang_masked_softmax_cuda": """
        forward: input scale_factor
        backward: output_grads! softmax_results scale_factor
    """,
    "scaled_masked_softmax_cuda": """
        forward: input mask scale_factor
        backward: output_grads! softmax_results scale_factor
    """,
}
_HARMLESS = {"scaled_masked_softmax_cuda": frozenset({"get_batch_per_block"})}


def libraries() -> list[Library]:
    return [
        Library(name, name, read(name, text), _HARMLESS.get(name, frozenset()))
        for name, text in _TABLES.items()
    ]
