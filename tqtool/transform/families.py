"""The architectures that are known, as data: their norms and biases, what is fused, which cannot be rotated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tqtool.transform.experts import Experts
from tqtool.transform.outputs import Role

POST_NORM_REFUSAL = (
    "it normalizes what attention and MLP write before adding it to the residual stream (post-norms); "
    "that gain acts per channel on a writer's output, so a residual rotation cannot pass through it"
)
LAYER_NORM_REFUSAL = (
    "its norms are LayerNorms, which subtract the mean over channels; a rotation keeps lengths and not means, and the "
    "weights that write the residual stream are not centred, which would make RMSNorms of them"
)


class Slot(StrEnum):
    """A parameter's place in the block: finer than its role, because the folds differ."""

    EMBEDDING = "embedding"
    HEAD = "head"
    FINAL_NORM = "final_norm"
    ATTENTION_NORM = "attention_norm"  # read by q, k, v
    MLP_NORM = "mlp_norm"  # read by gate, up
    EMBEDDING_NORM = "embedding_norm"  # read by a draft head, of the next token
    HIDDEN_NORM = "hidden_norm"  # the same, of the trunk's hidden state
    INNER_NORM = "inner_norm"  # in head space, or a post-norm: never folded
    QKV = "qkv"  # rows of q, then k, then v
    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the projection's usual name
    GATE_UP = "gate_up"  # rows of gate, then of up
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    ROUTER = "router"
    LINEAR_IN = "linear_in"
    LINEAR_OUT = "linear_out"
    RATE = "rate"
    CONVOLUTION = "convolution"
    STATE = "state"
    DECAY = "decay"
    FUSE = "fuse"
    TOWER = "tower"
    TOWER_OUT = "tower_out"  # the one matrix of a vision tower that writes the residual stream, and its bias

    @property
    def role(self) -> Role:
        """Role of the slot's weight."""
        if self.value.endswith("norm"):
            return Role.NORM
        return {Slot.CONVOLUTION: Role.STATE, Slot.TOWER_OUT: Role.TOWER}.get(self) or Role(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture, as far as names and folds go.

    Attributes:
        model_type: ``model_type`` in config.json.
        qkv_bias: Whether q, k, v have a bias; ``"config"`` reads ``attention_bias``, which then covers o_proj too.
        is_fused: q, k and v are one projection, and so are gate and up.
        mlp_bias: Whether ``mlp_bias`` in config.json is honoured.
        qk_norm: q_norm and k_norm, gains of ``[head_dim]``.
        sandwich_norms: Gemma 3's four norms per layer.
        gain_offset: 1 where norms multiply by 1 + w, else 0.
        head_dim: head_dim if config.json does not say; None means hidden_size / num_attention_heads.
        experts: The experts of its MLPs, or None.
        is_hybrid: Gated DeltaNet layers between layers of gated attention, inside a model that may have a vision tower;
            norms are stored around zero by Hugging Face and as they are by mlx-lm.
        rotation_refusal: Why a residual rotation cannot be folded, or None.
    """

    model_type: str
    qkv_bias: Literal["config", "always", "never"] = "config"
    is_fused: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    gain_offset: float = 0.0
    head_dim: int | None = None
    experts: Experts | None = None
    is_hybrid: bool = False
    rotation_refusal: str | None = None


QWEN_EXPERT = {Role.GATE: "gate_proj", Role.UP: "up_proj", Role.DOWN: "down_proj"}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(model_type="llama", mlp_bias=True),
        Family(model_type="mistral"),
        Family(model_type="smollm3", mlp_bias=True),  # llama; which layers rotate their heads is no fold's business
        Family(model_type="granite", mlp_bias=True),  # llama; its four multipliers are scalars: R passes through
        Family(model_type="phi3", qkv_bias="never", is_fused=True),
        Family(model_type="qwen2", qkv_bias="always"),
        Family(model_type="qwen3", qk_norm=True, head_dim=128),
        Family(
            model_type="qwen3_moe",
            qk_norm=True,
            experts=Experts(
                block="mlp",
                names=QWEN_EXPERT,
                count_keys=("num_experts", "num_local_experts"),
                width_key="moe_intermediate_size",
                sparse_fields=True,
            ),
        ),
        Family(
            model_type="mixtral",
            qkv_bias="never",
            experts=Experts(
                block="block_sparse_moe",
                names={Role.GATE: "w1", Role.UP: "w3", Role.DOWN: "w2"},
                count_keys=("num_local_experts",),
                width_key="intermediate_size",
            ),
        ),
        Family(model_type="qwen3_5", qkv_bias="never", qk_norm=True, is_hybrid=True),
        Family(
            model_type="qwen3_5_moe",
            qkv_bias="never",
            qk_norm=True,
            is_hybrid=True,
            experts=Experts(
                block="mlp",
                names=QWEN_EXPERT,
                count_keys=("num_experts", "num_local_experts"),
                width_key="moe_intermediate_size",
                shared_key="shared_expert_intermediate_size",
            ),
        ),
        Family(
            model_type="gemma3_text",
            qk_norm=True,
            sandwich_norms=True,
            gain_offset=1.0,
            head_dim=256,
            rotation_refusal=POST_NORM_REFUSAL,
        ),
    )
}

# Cannot be rotated, and their tensors are not planned yet either: the refusal still names the reason.
REFUSED_ROTATION: dict[str, str] = {
    **dict.fromkeys(("gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_text"), POST_NORM_REFUSAL),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4", "glm4"), POST_NORM_REFUSAL),
    # cohere and phi run attention and MLP side by side, which alone would not matter.
    **dict.fromkeys(("cohere", "cohere2", "phi", "starcoder2", "stablelm", "gpt_neox", "gpt2"), LAYER_NORM_REFUSAL),
}
