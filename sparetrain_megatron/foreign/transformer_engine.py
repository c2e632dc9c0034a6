"""The kernels of ``transformer_engine_torch``, from release 2.8 on.

Names and order of parameters, and what is written, are those of the extension's sources
(``transformer_engine/pytorch/csrc/extensions``). A quantizer's amax needs no mark: see ``objects``.
"""

from __future__ import annotations

from .table import Library, Version, read

MODULE = "transformer_engine_torch"

KERNELS = """
# --- matrix products
generic_gemm: A transA B transB D! quantizer output_dtype bias bias_type gelu gelu_in grad workspace# workspace_size accumulate use_split_accumulator comm_overlap comm_type extra_output! bulk_overlap alpha beta
# With grad, the gradients of biases are written into the list of biases.
te_general_grouped_gemm: A transa B transb D! D_type m_splits bias!grad bias_type single_output pre_gelu_out! grad workspace# workspaceSize accumulate use_split_accumulator math_sm_count

# --- quantising
quantize: tensor quantizer output! noop
dequantize: input otype
bgrad_quantize: input quantizer
split_quantize: tensor split_sections quantizer_list disable_bulk_allocation
multi_tensor_quantize: tensor_list quantizer_list
fp8_transpose: input dtype out!
compute_amax: input amax!
fused_amax_and_scale_update_after_reduction: amax_reduction_buffer amax_histories! scales! amax_compute_algo fp8_dtype margin
fp8_block_scaling_compute_partial_amax: tensor amax! h w start_offset block_len
fp8_block_scaling_partial_cast: inp out! scale h w start_offset block_len out_dtype
mxfp8_scaling_compute_partial_amax: input amax_rowwise! amax_colwise! rows cols start_offset
mxfp8_scaling_partial_cast: input output_rowwise! output_colwise! scale_inv_rowwise scale_inv_colwise rows cols start_offset

# --- norms, activations, dropout, softmax
rmsnorm_fwd: input weight eps ln_out! quantizer otype sm_margin zero_centered_gamma
rmsnorm_bwd: dz x rsigma gamma sm_margin zero_centered_gamma
rmsnorm_bwd_add: dz x add rsigma gamma sm_margin zero_centered_gamma
layernorm_fwd: input weight bias eps ln_out! quantizer otype sm_margin zero_centered_gamma
layernorm_bwd: dz x mu rsigma gamma sm_margin zero_centered_gamma
gelu relu silu srelu qgelu glu geglu reglu swiglu sreglu qgeglu: input quantizer
dgelu drelu dsilu dsrelu dqgelu dglu dgeglu dreglu dswiglu dsreglu dqgeglu: grad input quantizer
dbias_dgelu dbias_drelu dbias_dsilu dbias_dsrelu dbias_dqgelu: grad input quantizer
clamped_swiglu: input quantizer limit alpha glu_linear_offset
clamped_dswiglu: grad input quantizer limit alpha glu_linear_offset
situglu: input quantizer beta1 beta2
dsituglu: grad input quantizer beta1 beta2
scaled_swiglu: input act_scales quantizer glu_interleave_size
scaled_dswiglu: grad input act_scales quantizer glu_interleave_size compute_scale_grad
scaled_clamped_swiglu: input act_scales quantizer limit alpha glu_linear_offset glu_interleave_size
scaled_clamped_dswiglu: grad input act_scales quantizer limit alpha glu_linear_offset glu_interleave_size compute_scale_grad
scaled_situglu: input act_scales quantizer beta1 beta2 glu_interleave_size
scaled_dsituglu: grad input act_scales quantizer beta1 beta2 glu_interleave_size compute_scale_grad
scaled_srelu: input act_scales quantizer
scaled_dsrelu: grad input act_scales quantizer compute_scale_grad
dropout_fwd: input dropout_probability out! ; random
dropout_bwd: grad_output mask dropout_probability grad_input!
scaled_softmax_forward scaled_upper_triang_masked_softmax_forward scaled_aligned_causal_masked_softmax_forward: input scale_factor
scaled_masked_softmax_forward: input mask scale_factor
# Up to 2.16 the gradient is written in place.
scaled_softmax_backward scaled_masked_softmax_backward scaled_upper_triang_masked_softmax_backward scaled_aligned_causal_masked_softmax_backward: output_grads! softmax_results scale_factor

# --- attention
fused_attn_fwd: max_seqlen_q max_seqlen_kv is_training attn_scale p_dropout set_zero qkv_layout bias_type attn_mask_type softmax_type window_size cu_seqlens_q cu_seqlens_kv Q K V fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded page_table_k page_table_v s_quantizer o_quantizer Bias SoftmaxOffset rng_gen rng_elts_per_thread ; random
fused_attn_bwd: max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero qkv_layout
fused_rope_forward: input freqs start_positions qkv_format interleaved cu_seqlens cp_size cp_rank
fused_rope_backward: output_grads freqs
fused_qkv_rope_forward: qkv_input q_freqs k_freqs start_positions qkv_split_arg_list qkv_format interleaved cp_size cp_rank
fused_qkv_rope_backward: q_grad_out k_grad_out v_grad_out q_freqs k_freqs qkv_split_arg_list qkv_format interleaved cp_size cp_rank
fa_prepare_fwd: qkvi
fa_prepare_bwd: q k v
convert_thd_to_bshd: tensor cu_seqlens b max_seq_len
convert_bshd_to_thd: tensor cu_seqlens t

# --- experts
fused_topk_with_score_function_fwd: logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias routing_map_format topk_indices!
fused_topk_with_score_function_bwd: num_tokens num_experts routing_map intermediate_output grad_probs topk use_pre_softmax scaling_factor score_function
fused_topk_with_score_function_bwd@2.13: num_tokens num_experts routing_map intermediate_output grad_probs grad_logits! topk use_pre_softmax scaling_factor score_function
fused_topk_with_score_function_bwd@2.17: routing_map intermediate_output grad_probs grad_logits! topk use_pre_softmax scaling_factor score_function use_dense_indices routing_map_format
fused_score_for_moe_aux_loss_fwd: logits topk score_function routing_map_format
fused_score_for_moe_aux_loss_bwd: num_tokens num_experts intermediate_output grad_probs topk score_function
fused_score_for_moe_aux_loss_bwd@2.13: num_tokens num_experts intermediate_output grad_scores grad_logits! topk score_function
fused_score_for_moe_aux_loss_bwd@2.17: intermediate_output grad_scores grad_logits! topk score_function
fused_moe_aux_loss_fwd fused_moe_aux_loss_fwd_graph_safe: probs tokens_per_expert total_num_tokens num_experts num_rows num_cols topk coeff
fused_moe_aux_loss_bwd: Const_buf tokens_per_expert num_rows num_cols grad_aux_loss
moe_permute_fwd: input dtype indices num_out_tokens workspace# max_expanded_token_num ; undefined 2
moe_permute_bwd: input dtype row_id_map prob num_tokens topK
moe_unpermute_fwd: input dtype row_id_map prob num_tokens topK
moe_unpermute_bwd: input_bwd input_fwd dtype row_id_map prob
fused_multi_row_padding: input output! input_row_list padded_input_row_list
fused_multi_row_unpadding: input output! input_row_list unpadded_input_row_list
splits_to_offsets: first_dims logical_last_dim
splits_to_offsets_multi: split_sizes device strides include_leading_zero dtypes bulk_allocate_outputs
swap_first_dims: tensor out!

# --- the optimizer: lists of gradients, parameters, moments, ...; noop_flag is raised at an overflow
multi_tensor_l2norm: chunk_size noop_flag! tensor_lists per_tensor
multi_tensor_unscale_l2norm: chunk_size noop_flag! tensor_lists inv_scale per_tensor
multi_tensor_scale: chunk_size noop_flag! tensor_lists! scale ; itemwise tensor_lists
multi_tensor_scale_tensor: chunk_size is_infinite! tensor_lists! scale ; itemwise tensor_lists
multi_tensor_adam: chunk_size noop_flag! tensor_lists!1 lr beta1 beta2 epsilon step mode bias_correction weight_decay ; itemwise tensor_lists
multi_tensor_adam_param_remainder multi_tensor_adam_fp8: chunk_size noop_flag! tensor_lists!1 lr beta1 beta2 epsilon step mode bias_correction weight_decay fp8_dtype ; itemwise tensor_lists
# The capturable ones unscale the gradients in place.
multi_tensor_adam_capturable multi_tensor_adam_capturable_master: chunk_size noop_flag! tensor_lists! lr beta1 beta2 epsilon step mode bias_correction weight_decay inv_scale ; itemwise tensor_lists
multi_tensor_sgd: chunk_size noop_flag! tensor_lists! wd momentum dampening lr nesterov first_run wd_after_momentum scale ; itemwise tensor_lists
multi_tensor_compute_scale_and_scale_inv: chunk_size noop_flag! tensor_lists!1 max_fp8 force_pow_2_scales epsilon ; itemwise tensor_lists
multi_tensor_compute_scale_inv_e8m0: chunk_size dummy tensor_lists!1 ; itemwise tensor_lists
"""  # noqa: E501

HARMLESS = frozenset(
    """
    get_cublasLt_version get_cudnn_version get_num_cublas_streams get_stream_priority_range
    get_fused_attn_backend get_grouped_gemm_setup_workspace_size
    ubuf_built_with_mpi device_supports_multicast nvte_built_with_cublasmp
    create_empty_quantized_tensor bulk_allocate
    cusolvermp_ctx_create cusolvermp_ctx_destroy
    ep_initialize ep_finalize ep_get_zero_copy ep_zero_copy_supported ep_handle_mem_size
    grouped_mlp_experimental
    """.split()
)
"""Queries, allocations without a value, and settings."""

_GROUPED = "grouped tensors are not taken apart"
_RING = "context parallelism is not supported"
_MOVES = "it communicates"
_FP4 = "FP4 is not supported"
_POINTERS = "it passes addresses on"
_INFERENCE = "inference is not protected"
_CUDA_ONLY = "it has not been tested with faults"

UNPROTECTED = {
    **dict.fromkeys(
        """
        group_quantize bgrad_group_quantize group_dequantize group_requantize_inplace
        te_general_grouped_gemm_for_grouped_tensor te_general_grouped_gemm_for_discrete_in
        te_general_grouped_gemm_for_discrete_out grouped_swizzle_for_gemm
        """.split(),
        _GROUPED,
    ),
    **dict.fromkeys(
        """
        thd_read_half_tensor thd_second_half_lse_correction thd_read_second_half_lse
        thd_out_correction thd_grad_correction thd_get_partitioned_indices
        thd_copy_valid_tokens_from_per_split_to_rank_local thd_cp_rank_order_to_sequence_order
        thd_sequence_order_to_cp_rank_order
        """.split(),
        _RING,
    ),
    **dict.fromkeys(
        """
        bulk_overlap_ag_with_external_gemm ep_prepare ep_dispatch ep_dispatch_bwd ep_combine
        ep_combine_bwd ep_prepare_and_dispatch init_nvshmem_backend create_nvshmem_tensor
        nvshmem_send_on_current_stream nvshmem_wait_on_current_stream nvshmem_finalize
        newton_schulz
        """.split(),
        _MOVES,
    ),
    **dict.fromkeys(
        """
        nvfp4_2d_compute_partial_amax nvfp4_2d_multi_tensor_transpose nvfp4_2d_partial_cast
        nvfp4_2d_scale_transpose nvfp4_compute_global_scale nvfp4_compute_per_block_scale
        nvfp4_data_transpose nvfp4_expand_scale_to_fp8 nvfp4_fused_scale
        nvfp4_group_quantize_with_amax nvfp4_multi_tensor_2d_partial_cast
        nvfp4_multi_tensor_compute_partial_amax nvfp4_multi_tensor_fused_scale
        nvfp4_quantize_with_amax
        """.split(),
        _FP4,
    ),
    **dict.fromkeys(
        """
        convert_host_pointers_to_tensor copy_data_ptrs_to_device
        get_device_pointer_for_data_and_scales
        """.split(),
        _POINTERS,
    ),
    "copy_to_kv_cache": _INFERENCE,
    **dict.fromkeys(
        """
        multi_tensor_swizzle_scales_for_gemm_ multi_tensor_swizzle_scales_for_gemm_unchecked_
        swizzle_scales_for_gemm_ multi_tensor_transpose_to_bhsd multi_tensor_pad_last_dim
        fused_topk_with_score_function_qb_fwd
        """.split(),
        _CUDA_ONLY,
    ),
}
"""Counted, and in strict mode refused, with the reason."""


OPERATORS = ("te_softmax", "te_attention")
"""Namespaces of operators that call kernels. The dispatcher sees these; their schemas tell all."""


def library(version: Version | None = None) -> Library:
    """The table as it holds for one release.

    Args:
        version: (major, minor); None: the newest known.
    """
    return Library("te", MODULE, read("te", KERNELS, version), HARMLESS, UNPROTECTED)
