"""LoRA's variants, bases and optimizers, each trained and loaded back: `python variant_scenarios.py FOLDER`.

Writes FOLDER/found.json: for each variant what became of its run, or why it was refused.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_training import LORA, NF4, build_base, build_data, build_recipe, plan_of

EIGHT = {"load_in_8bit": True}
# 64 wide and rank 64: adapters of 4,096 elements, below which bitsandbytes keeps 32-bit states.
WIDE = {"r": 64, "lora_alpha": 64}
NEW = {"add_special_tokens": ["<|tool|>", "<|obs|>"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"lora": {**LORA, "use_rslora": True}},
    "dora": {"lora": {**LORA, "use_dora": True}},
    "gaussian": {"lora": {**LORA, "init_lora_weights": "gaussian"}},
    "random B": {"lora": {**LORA, "init_lora_weights": False}},
    "orthogonal": {"lora": {**LORA, "init_lora_weights": "orthogonal"}},
    "olora": {"lora": {**LORA, "init_lora_weights": "olora"}},
    "pissa": {"lora": {**LORA, "init_lora_weights": "pissa"}},
    "pissa_niter_4": {"lora": {**LORA, "init_lora_weights": "pissa_niter_4", "use_rslora": True}},
    "pissa patterns": {
        "lora": {**LORA, "init_lora_weights": "pissa", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    },
    "pissa and head": {"lora": {**LORA, "init_lora_weights": "pissa", "modules_to_save": ["lm_head"]}},
    "pissa on an embedding": {
        "lora": {**LORA, "init_lora_weights": "pissa", "target_modules": ["q_proj", "embed_tokens"]}
    },
    "lora_bias": {"lora": {**LORA, "lora_bias": True}, "quantization": NF4},
    "velora": {"lora": {**LORA, "velora_config": {}}},
    "parameters": {"lora": {**LORA, "target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]}},
    "mica": {"lora": {**LORA, "init_lora_weights": "mica"}},
    "bias": {"lora": {**LORA, "bias": "lora_only"}},
    "patterns": {"lora": {**LORA, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 16}}},
    "nf4 rslora": {"lora": {**LORA, "use_rslora": True}, "quantization": NF4},
    "nf4 dora": {"lora": {**LORA, "use_dora": True}, "quantization": NF4},
    "nf4 neftune": {"neftune_noise_alpha": 5.0, "quantization": NF4},
    "nf4 saved head": {"lora": {**LORA, "modules_to_save": ["lm_head"]}, "quantization": NF4},
    "nf4 saved embedding": {"lora": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}, "quantization": NF4},
    "tied, saved head": {"lora": {**LORA, "modules_to_save": ["lm_head"]}, "base": "tied"},
    "tied, saved embedding": {"lora": {**LORA, "modules_to_save": ["embed_tokens"]}, "base": "tied"},
    "tied, saved both": {"lora": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}, "base": "tied"},
    "nf4 tokens": {"lora": {**LORA, "trainable_token_indices": [40, 50]}, "quantization": NF4},
    "8-bit base": {"quantization": EIGHT},
    "8-bit base dora": {"quantization": EIGHT, "lora": {**LORA, "use_dora": True}},
    **{name: {"optim": name, "lora": WIDE} for name in ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")},
    "small 8-bit": {"optim": "adamw_bnb_8bit"},
    "new tokens": {"model": NEW, "quantization": NF4},
    "new tokens, tied": {"model": NEW, "quantization": NF4, "base": "tied"},
    "new tokens, saved embedding": {"model": NEW, "lora": {**LORA, "modules_to_save": ["embed_tokens"]}},
    "new tokens, tied, saved both": {
        "model": NEW,
        "lora": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]},
        "base": "tied",
    },
    "new tokens, spare rows": {"model": NEW, "base": "spare", "quantization": NF4},
    "new tokens, all weights": {"model": NEW, "lora": None},
    "all weights": {"lora": None},
}


# Those whose state is more than LoRA matrices on an unchanged base.
RESUMED = ("pissa_niter_4", "dora", "new tokens", "new tokens, tied", "paged_adamw_8bit")


def run_of(folder: Path, name: str, base: str = "base", **recipe: Any) -> Any:
    from accelerate.state import AcceleratorState

    from tunebook.data.tokenizer import tokenizer_of
    from tunebook.launching.world import World
    from tunebook.training.ready import build_run

    AcceleratorState._reset_state()
    accepted = build_recipe(folder / base, **{"num_train_epochs": 1, "activation_checkpointing": False, **recipe})
    tokenizer = tokenizer_of(accepted)
    data = build_data(num_rows=16, num_eval_rows=4, num_examples=0)
    if accepted.model.add_special_tokens:
        rows = [with_tokens(row, tokenizer) for row in data.train]
        data = replace(data, train=data.train.from_list(rows, features=data.train.features))
    plan = plan_of(accepted, World(), data, folder / "runs" / name)
    return build_run(accepted, plan, World(), tokenizer, data)


def with_tokens(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Put the new tokens before a row's last token, among what is trained."""
    ids = tokenizer.convert_tokens_to_ids(NEW["add_special_tokens"])
    longer = {name: [*row[name][:-1], *ids, row[name][-1]] for name in ("input_ids", "labels")}
    return {**longer, "length": row["length"] + len(ids)}


def train_variant(folder: Path, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Train two steps, load what came out onto a fresh base, and return how near that is to the trained model."""
    import torch

    from tunebook.model.adapter import write_adapter
    from tunebook.training.run import build_trainer

    run = run_of(folder, name, **recipe)
    trainer, out = build_trainer(run, None), folder / "runs" / name / "adapter"
    before = {key: value.detach().clone() for key, value in run.model.named_parameters() if value.requires_grad}
    trainer.train_on(None)
    still = [key for key, value in run.model.named_parameters() if key in before and torch.equal(value, before[key])]
    notes = write_adapter(run.model, run.tokenizer, run.recipe, out, 257)
    live = logits(run.model, run.tokenizer)
    states = trainer.optimizer.optimizer.state.values()
    config = out / "adapter_config.json"
    return {
        "steps": trainer.state.global_step,
        "loss": trainer.state.log_history[0]["loss"],
        "trained": sorted(before),
        "still": still,
        "difference": float((live - logits(load_back(run, out), run.tokenizer)).abs().max()),
        "states": sorted({str(value.dtype) for state in states for value in state.values() if hasattr(value, "dtype")}),
        "notes": list(notes),
        "config": json.loads(config.read_text()) if config.is_file() else None,
        "rows": run.model.get_input_embeddings().weight.shape[0],
        "megabytes": sum(path.stat().st_size for path in out.glob("*.safetensors")) / 1e6,
    }


def resume(folder: Path, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Go on from a checkpoint after the first of two steps, and return the difference to the unbroken run."""
    from tunebook.model.adapter import adapter_tensors
    from tunebook.runs.checkpoints import check_whole
    from tunebook.training.run import build_trainer

    recipe = {**recipe, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"}
    whole = build_trainer(run_of(folder, f"{name}, resumed", **recipe), None)
    whole.train_on(None)
    again = build_trainer(run_of(folder, f"{name}, resumed", **recipe), None)
    checkpoint = check_whole(Path(whole.args.output_dir) / "checkpoint-1")
    again.go_on_from(checkpoint)
    again.train_on(checkpoint)
    expected, found = adapter_tensors(whole.model), adapter_tensors(again.model)
    assert expected.keys() == found.keys()
    return {
        "after": checkpoint.step,
        "difference": max(float((found[key] - expected[key]).abs().max()) for key in expected),
    }


def logits(model: Any, tokenizer: Any) -> Any:
    import torch

    ids = torch.arange(32, 96).reshape(2, 32)
    if "<|tool|>" in tokenizer.get_vocab():
        ids[:, 5] = tokenizer.convert_tokens_to_ids("<|tool|>")
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.float()


def load_back(run: Any, out: Path) -> Any:
    """Load what came out as a stranger would, with nothing of tunebook's but its guard for CPUs."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from tunebook.model.model import keep_4bit_weights

    if run.recipe.lora is None:
        return AutoModelForCausalLM.from_pretrained(out)
    given = run.recipe.quantization
    settings = BitsAndBytesConfig(**given, bnb_4bit_compute_dtype=torch.float32) if given else None
    model = AutoPeftModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=settings)
    keep_4bit_weights(model)
    return model


def main(folder: Path) -> None:
    """Train every variant in this process and write what was found."""
    from tunebook.errors import Refused
    from tunebook.launching.process_group import process_group
    from tunebook.launching.world import World
    from tunebook.system.quiet import quiet_libraries

    build_base(folder / "base")
    build_base(folder / "tied", tie_word_embeddings=True)
    build_base(folder / "spare", vocab_size=320)  # as Qwen2.5, whose embedding has more rows than its tokenizer ids
    found: dict[str, Any] = {}
    with process_group(World()):
        for name, recipe in VARIANTS.items():
            began = time.monotonic()
            try:
                with quiet_libraries():
                    found[name] = train_variant(folder, name, recipe)
                    if name in RESUMED:
                        found[f"{name}, resumed"] = resume(folder, name, recipe)
            except Refused as refused:
                found[name] = {"refused": refused.render()}
            except AttributeError as error:  # what recipe/lora_checks.py spares users
                found[name] = {"broke": str(error)}
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    (folder / "found.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
