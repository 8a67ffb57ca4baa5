"""The smallest model that has every part, for tests that step it many times."""

from __future__ import annotations

from characters_serve.config import ModelConfig

SMALL = ModelConfig(
    name="small",
    weights="synthetic",
    width=128,
    height=64,
    dim=64,
    num_blocks=2,
    num_heads=2,
    head_dim=32,
    mlp_dim=96,
    adaln_rank=16,
    rope_split=(12, 10, 10),
)
