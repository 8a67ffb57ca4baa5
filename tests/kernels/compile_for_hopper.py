"""Compiles every kernel for sm_90 at the shapes of a quarter of the 57B model. Needs no GPU.

Run as a script by its test, since Triton's interpreter and its compiler do not share a process.
Prints a line for each kernel: its name, shared memory in bytes, and how many of its instructions
go through NVLink's multicast.
"""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from characters_kernels import (
    attention,
    delta_rotate,
    frame_tile,
    gelu_quant,
    gemm_all_reduce,
    linear_fp8,
    residual_norm,
    ring_store,
    square_sums,
)

BF16, F32, FP8, I32 = "*bf16", "*fp32", "*fp8e4nv", "i32"


def compiled(
    kernel: Any,
    types: dict[str, Any],
    constants: dict[str, Any],
    label: str = "",
    **options: int,
) -> None:
    """types: of the arguments; integers are taken as multiples of 16 where the launcher's are."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind[0] == "*" or name.endswith(("stride", "element", "columns", "depth"))
        }
        | {
            (names.index(name), index): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if isinstance(kind, tuple)
            for index in range(len(kind))
        },
    )
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    multicast = built.asm["ptx"].count("multimem.")
    print(kernel.__name__ + label, built.metadata.shared, multicast, flush=True)


def main() -> None:
    saturated = {"saturated": "*i32"}
    for wide in (False, True):
        compiled(
            ring_store._ring_store_kernel,
            dict.fromkeys(("projected", "q_weight", "k_weight"), BF16)
            | dict.fromkeys(("cos", "sin", "q_scale", "k_scale", "v_scale", "square_sums"), F32)
            | dict.fromkeys(("q_out", "k_cache", "v_cache"), FP8)
            | dict.fromkeys(("tokens", "heads", "row_stride", "width"), I32)
            | {"slot": "*i64", "eps": "fp32"}
            | saturated,
            {"HALF": 64, "TOKENS": 16, "FP8": True, "WIDE": wide},
        )
    compiled(
        square_sums._square_sums_kernel,
        dict.fromkeys(("row_stride", "width"), I32) | {"projected": BF16, "out": F32},
        {"COLUMNS": 8192},
        num_warps=8,
    )
    compiled(
        delta_rotate._delta_rotate_kernel,
        dict.fromkeys(("cache_stride", "first_element", "num_keys"), I32)
        | {"keys": FP8, "cos": F32, "sin": F32}
        | saturated,
        {"PLANES": 22, "PADDED": 32, "HALF": 64, "KEYS": 64, "FP8": True},
    )
    compiled(
        residual_norm._residual_norm_kernel,
        dict.fromkeys(("x", "branch", "gate", "scale", "shift"), BF16)
        | {"out_scale": F32, "out": FP8, "dim": I32, "eps": "fp32"}
        | saturated,
        {"HEAD": 8192, "TAIL": 1024, "RESIDUAL": True, "FP8": True},
        num_warps=8,
    )
    compiled(
        gelu_quant._gelu_quant_kernel,
        dict.fromkeys(("attended_stride", "mlp_stride", "inner", "total"), I32)
        | {"attended": BF16, "mlp": BF16, "out_scale": F32, "out": FP8}
        | saturated,
        {"COLUMNS": 2048, "FP8": True},
    )
    compiled(
        linear_fp8._linear_kernel,
        dict.fromkeys(("rows", "columns", "depth"), I32)
        | {"x": FP8, "weight": FP8, "x_scale": F32, "weight_scale": F32, "out": BF16},
        {"ROWS": 128, "COLUMNS": 256, "DEPTH": 128, "GROUP": 8},
        num_warps=8,
        num_stages=3,
    )
    compiled(
        attention._attention_kernel,
        dict.fromkeys(("q", "k", "v"), FP8)
        | dict.fromkeys(("q_scale", "k_scale", "v_scale"), F32)
        | dict.fromkeys(("num_queries", "num_keys", "heads"), I32)
        | {"out": BF16, "softmax_scale": "fp32"},
        {"D": 128, "QUERIES": 128, "KEYS": 128},
        num_warps=8,
        num_stages=3,
    )
    plan = gemm_all_reduce.steady_plan(132)
    for in_switch, gated in ((False, False), (False, True), (True, False)):
        compiled(
            gemm_all_reduce._gemm_all_reduce_kernel,
            {
                "x": f"tensordesc<fp8e4nv[{plan.rows}, {plan.depth}]>",
                "weight": f"tensordesc<fp8e4nv[{plan.columns}, {plan.depth}]>",
                "counts": "*i64",
                "regions": ("i64",) * 4,
                "multicast": "i64",
                "timeout_ns": "i64",
                "gate": BF16,
            }
            | dict.fromkeys(("x_scale", "weight_scale"), F32)
            | dict.fromkeys(("rows", "columns", "depth", "rank"), I32),
            {
                "WORLD": 4,
                "ROWS": plan.rows,
                "COLUMNS": plan.columns,
                "DEPTH": plan.depth,
                "SLICE": plan.slice_rows,
                "COMPUTING": plan.computing,
                "PROGRAMS": plan.programs,
                "ADDING_FROM": plan.adding_from,
                "GATED": gated,
                "IN_SWITCH": in_switch,
            },
            label=".in_switch" * in_switch + ".gated" * gated,
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
    products = dict.fromkeys(("s0", "s1", "s2", "s3", "s4", "s5"), "*fp16")
    sizes = dict.fromkeys(("positions", "channels", "frame"), I32)
    for frames in (1, 4):
        compiled(
            frame_tile._norm_silu_tile_kernel,
            (products if frames == 4 else dict.fromkeys(products, BF16))
            | dict.fromkeys(("bias", "gamma", "past"), BF16)
            | {"tile": "*fp16" if frames == 4 else BF16, "root": "fp32"}
            | sizes,
            {"FRAMES": frames, "PRODUCTS": frames == 4, "POSITIONS": 4, "COLUMNS": 256},
            label=f".{frames}",
        )
    compiled(
        frame_tile._join_tile_kernel,
        products | dict.fromkeys(("bias", "residual", "out"), BF16) | sizes,
        {"FRAMES": 4, "RESIDUAL": True, "POSITIONS": 4, "COLUMNS": 256},
    )


if __name__ == "__main__":
    main()
