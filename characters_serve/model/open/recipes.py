"""How each tensor of this project's layout is made from a published checkpoint's tensors.

In: the geometry. Out: a recipe for each key of the model's state dict: the tensors it needs, with
the names and shapes that the authors' code gives them, and how they become one. Reads no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from characters_serve.config import ModelConfig
from characters_serve.model.open.wan import PATCH

Shape = tuple[int, ...]
Recipes = dict[str, "Recipe"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """sources: name -> shape, in the order that `build` takes the tensors in."""

    sources: dict[str, Shape]
    build: Callable[..., Tensor]


def recipes_for(model: ModelConfig) -> Recipes:
    if model.family == "live_avatar":
        return live_avatar_recipes(model)
    if model.family == "causal_wan":
        return _trunk(model)
    raise ValueError(f"model.family {model.family} has no published checkpoints to convert")


def live_avatar_recipes(model: ModelConfig) -> Recipes:
    """Wan2.2-S2V-14B as published; the LoRA of LiveAvatar is merged into the sources before."""
    assert model.wan is not None and model.live_avatar is not None
    own, dim, z = model.live_avatar, model.dim, model.latent_channels
    found = _trunk(model)
    found |= _named("pose_embedding.weight", "cond_encoder.weight", _kernel(dim, z, 1), _flat)
    found |= _named("pose_embedding.bias", "cond_encoder.bias", (dim,))
    found |= _named("condition_kind", "trainable_cond_mask.weight", (3, dim))
    for index, (name, pack) in enumerate((("proj", 1), ("proj_2x", 2), ("proj_4x", 4))):
        into, source = f"motion_packers.{index}", f"frame_packer.{name}"
        found |= _named(f"{into}.weight", f"{source}.weight", _kernel(dim, z, pack))
        found |= _named(f"{into}.bias", f"{source}.bias", (dim,))

    encoder, into = "casual_audio_encoder", "speech_encoder"  # the first as they spell it
    found |= _named(f"{into}.mix", f"{encoder}.weights", (1, own.audio_layers, 1, 1), _whole)
    found |= _named(
        f"{into}.last_token", f"{encoder}.encoder.padding_tokens", (1, 1, 1, dim), _whole
    )
    convolutions = {
        "conv1_local": (own.audio_tokens * dim // 4, own.audio_dim),
        "conv1_global": (dim // 4, own.audio_dim),
        "conv2": (dim // 2, dim // 4),
        "conv3": (dim, dim // 2),
    }
    for name, (outputs, inputs) in convolutions.items():
        source = f"{encoder}.encoder.{name}.conv"
        found |= _named(f"{into}.{name}.weight", f"{source}.weight", (outputs, inputs, 3))
        found |= _named(f"{into}.{name}.bias", f"{source}.bias", (outputs,))
    found |= _linear(f"{into}.final_linear", f"{encoder}.encoder.final_linear", dim, dim)

    for index in range(len(own.audio_after_blocks)):
        source, into = "audio_injector.injector", f"injectors.{index}"
        found |= _cross_attention(f"{into}.attn", f"{source}.{index}", dim)
        found |= _linear(f"{into}.adain", f"{source}_adain_layers.{index}.linear", 2 * dim, dim)
    return found


def lora_targets(recipes: Recipes) -> set[str]:
    """The weights that the published LoRA files change: all attention and MLP matrices."""
    ends = (".q.weight", ".k.weight", ".v.weight", ".o.weight", ".ffn.0.weight", ".ffn.2.weight")
    names = (name for recipe in recipes.values() for name in recipe.sources)
    return {name for name in names if name.endswith(ends)}


def _trunk(model: ModelConfig) -> Recipes:
    """What every model of the Wan line has."""
    assert model.wan is not None
    dim, z, mlp = model.dim, model.latent_channels, model.mlp_dim
    channels = z * PATCH**2

    def patch_last(x: Tensor) -> Tensor:
        """The head's rows: theirs are (row, column, channel) of a patch, ours channel first."""
        return torch.unflatten(x, 0, (PATCH, PATCH, z)).movedim(2, 0).flatten(0, 2)

    found = _named("patch_embedding.weight", "patch_embedding.weight", _kernel(dim, z, 1), _flat)
    found |= _named("patch_embedding.bias", "patch_embedding.bias", (dim,))
    found |= _linear("text_embedding.0", "text_embedding.0", dim, model.wan.text_dim)
    found |= _linear("text_embedding.2", "text_embedding.2", dim, dim)
    into = "noise_level"
    found |= _linear(f"{into}.time_embedding.0", "time_embedding.0", dim, model.wan.freq_dim)
    found |= _linear(f"{into}.time_embedding.2", "time_embedding.2", dim, dim)
    found |= _linear(f"{into}.time_projection.1", "time_projection.1", 6 * dim, dim)
    for index in range(model.num_blocks):
        block = f"blocks.{index}"
        found |= _self_attention(f"{block}.self_attn", dim, model.num_heads)
        found |= _cross_attention(f"{block}.cross_attn", f"{block}.cross_attn", dim)
        found |= _named(f"{block}.norm3.weight", f"{block}.norm3.weight", (dim,))
        found |= _named(f"{block}.norm3.bias", f"{block}.norm3.bias", (dim,))
        found |= _linear(f"{block}.ffn.0", f"{block}.ffn.0", mlp, dim)
        found |= _linear(f"{block}.ffn.2", f"{block}.ffn.2", dim, mlp)
        found |= _named(f"{block}.modulation", f"{block}.modulation", (1, 6, dim), _first)
    found |= _named("head.head.weight", "head.head.weight", (channels, dim), patch_last)
    found |= _named("head.head.bias", "head.head.bias", (channels,), patch_last)
    found |= _named("head.modulation", "head.modulation", (1, 2, dim), _first)
    return found


def _self_attention(name: str, dim: int, num_heads: int) -> Recipes:
    def turned(x: Tensor) -> Tensor:
        """Rows of q and k: within a head first all that Wan turns as x, then all as y."""
        return torch.unflatten(x, 0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([turned(q), turned(k), v])

    found = _linear(f"{name}.o", f"{name}.o", dim, dim)
    for part, shape in (("weight", (dim, dim)), ("bias", (dim,))):
        sources: dict[str, Shape] = {f"{name}.{letter}.{part}": shape for letter in "qkv"}
        found[f"{name}.qkv.{part}"] = Recipe(sources, joined)
    for norm in ("norm_q", "norm_k"):
        found |= _named(f"{name}.{norm}.weight", f"{name}.{norm}.weight", (dim,), turned)
    return found


def _cross_attention(into: str, source: str, dim: int) -> Recipes:
    found = _linear(f"{into}.q", f"{source}.q", dim, dim)
    found |= _linear(f"{into}.o", f"{source}.o", dim, dim)
    for part, shape in (("weight", (dim, dim)), ("bias", (dim,))):
        sources: dict[str, Shape] = {f"{source}.{letter}.{part}": shape for letter in "kv"}
        found[f"{into}.kv.{part}"] = Recipe(sources, lambda k, v: torch.cat([k, v]))
    for norm in ("norm_q", "norm_k"):
        found |= _named(f"{into}.{norm}.weight", f"{source}.{norm}.weight", (dim,))
    return found


def _linear(into: str, source: str, outputs: int, inputs: int) -> Recipes:
    weight = _named(f"{into}.weight", f"{source}.weight", (outputs, inputs))
    return weight | _named(f"{into}.bias", f"{source}.bias", (outputs,))


def _named(
    into: str, source: str, shape: Shape, build: Callable[..., Tensor] = lambda x: x
) -> Recipes:
    return {into: Recipe({source: shape}, build)}


def _kernel(dim: int, channels: int, pack: int) -> Shape:
    return dim, channels, pack, PATCH * pack, PATCH * pack


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def _whole(x: Tensor) -> Tensor:
    return x.flatten()


def _first(x: Tensor) -> Tensor:
    return x[0]
