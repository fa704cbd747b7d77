"""A model of any size with random weights, NF4 and LoRA, made on the device itself: nothing is downloaded or saved."""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from tunebook.system.quiet import quiet_libraries
from tunebook.training.batches import tensors_of
from tunebook.training.head_loss import HeadLoss

RANK = 16
LORA: dict[str, Any] = {"r": RANK, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# config.json of Qwen/Qwen2.5-7B, and the same family small enough for a CPU.
QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072, "rope_theta": 1e6,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 4096,
}  # fmt: skip


def build_base(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Return a Qwen2 of a shape with random weights in `dtype`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**shape, tie_word_embeddings=False)
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def quantize(model: Any, device: str, dtype: torch.dtype) -> Any:
    """Put the linear layers of the blocks in NF4 with double quantisation, one after another; return the model."""
    import bitsandbytes as bnb

    from tunebook.model.model import keep_4bit_weights

    # Their names alone: a list of the layers would keep every weight that was replaced.
    names = [name for name, one in model.named_modules() if type(one) is nn.Linear and name != "lm_head"]
    for name in names:
        layer = model.get_submodule(name)
        given = {"compute_dtype": dtype, "quant_type": "nf4", "compress_statistics": True, "device": "meta"}
        quantized = bnb.nn.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, **given)
        quantized.weight = bnb.nn.Params4bit(
            layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=quantized
        )
        quantized.bias = layer.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, quantized.to(device))
    model.is_loaded_in_4bit = model.is_quantized = True
    keep_4bit_weights(model)
    return model


def add_adapter(model: Any) -> Any:
    """Return the model frozen, with float32 LoRA on all linear layers whose B is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    with quiet_libraries():
        adapted = get_peft_model(model, LoraConfig(**LORA, init_lora_weights="gaussian"))
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
            if "lora_B" in name:
                weight.data.normal_(std=0.01)
    adapted.config.use_cache = False
    return adapted


def dequantized(model: Any, shape: dict[str, Any], device: str) -> Any:
    """Return a float32 model with the very weights that an NF4 model computes with."""
    import bitsandbytes as bnb

    plain = build_base(shape, device, torch.float32)
    for name, weight in plain.named_parameters():
        held = model.get_parameter(name)
        state = getattr(held, "quant_state", None)
        values = held.data if state is None else bnb.functional.dequantize_4bit(held.data, state)
        weight.data.copy_(values.float().reshape(weight.shape))
    return plain


def apply_liger(base: Any) -> None:
    """Put Liger's norms, rotation and MLP into a model and into its module in transformers, for good."""
    liger = import_module("liger_kernel.transformers")
    liger.apply_liger_kernel_to_qwen2(model=base, fused_linear_cross_entropy=False)


def mean_loss(model: Any, head_loss: HeadLoss, micro_batch: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Return the mean loss of a micro-batch, as finetune.py computes it."""
    inputs, targets = tensors_of(micro_batch, device), tensors_of(micro_batch["targets"], device)
    with torch.autocast(device.partition(":")[0], dtype=dtype, enabled=dtype != torch.float32):
        return head_loss.sums(model, inputs, targets).loss / micro_batch["num_trained_tokens"]
