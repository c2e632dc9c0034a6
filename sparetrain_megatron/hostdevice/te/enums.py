"""The enumerations of ``transformer_engine_torch``, with the extension's own numbers."""

from __future__ import annotations

import enum

import torch


def _counted(name: str, members: str) -> type[enum.IntEnum]:
    return enum.IntEnum(name, {member: i for i, member in enumerate(members.split())})  # type: ignore


def _numbered(name: str, **members: int) -> type[enum.IntEnum]:
    return enum.IntEnum(name, members)  # type: ignore[return-value]


DType = _numbered(
    "DType",
    kByte=0,
    kInt32=2,
    kFloat32=4,
    kFloat16=5,
    kBFloat16=6,
    kFloat8E4M3=7,
    kFloat8E5M2=8,
    kFloat4E2M1=10,
)
FLOAT8 = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
LARGEST = {7: 448.0, 8: 57344.0}
"""The largest finite value of each FP8 type."""
TORCH = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    **FLOAT8,
}

_LAYOUTS = """
    NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD
    NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD
    NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD
    NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD
    NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD
    NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD
    NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET
"""


def enumerations(version: tuple[int, int]) -> dict[str, type[enum.IntEnum]]:
    """All of them by name, as the release with this version has them."""
    backends = {"NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2, "NVTE_No_Backend": -1}
    if version < (2, 18):
        backends["NVTE_F16_max512_seqlen"] = 0
    counted = {
        "FP8FwdTensors": " ".join(
            f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")
        ),
        "FP8BwdTensors": " ".join(
            f"{what}{i}" for i in (1, 2, 3) for what in ("GRAD_OUTPUT", "GRAD_INPUT")
        ),
        "CommOverlapType": "RS AG",
        "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P "
        "SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P "
        "ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
        "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
        "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
        "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
        "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
        "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK "
        "NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
        "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
        "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
        "NVTE_QKV_Format": "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD "
        "NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD NVTE_QKV_Format_NOT_SET",
        "NVTE_QKV_Layout": _LAYOUTS,
    }
    return {
        "DType": DType,
        "NVTEScalingMode": _numbered(
            "NVTEScalingMode",
            NVTE_DELAYED_TENSOR_SCALING=0,
            NVTE_MXFP8_1D_SCALING=1,
            NVTE_BLOCK_SCALING_1D=2,
            NVTE_BLOCK_SCALING_2D=3,
            NVTE_NVFP4_1D_SCALING=4,
            NVTE_INVALID_SCALING=100,
        ),
        "NVTE_Fused_Attn_Backend": _numbered("NVTE_Fused_Attn_Backend", **backends),
        **{name: _counted(name, members) for name, members in counted.items()},
    }
