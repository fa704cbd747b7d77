"""The 7B recipe copied for every architecture and trained for two steps: `python copying_scenarios.py FOLDER`.

Writes FOLDER/found.json: for each architecture what the run was made of, and how far the adapter that is loaded back is
from the model that was trained.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES, build_architecture
from checkout import ROOT

RECIPE = ROOT / "recipes" / "qwen7b_qlora.yaml"
WORDS = ("red", "green", "blue", "yellow", "one", "two", "three", "four", "five", "six", "seven", "cat", "dog", "house")
NUM_ROWS = 65  # of which 2 % are one, and 64 fill the recipe's global batch: a step for each epoch


def copy_recipe(folder: Path, model: Path) -> Path:
    """Copy the 7B recipe with three keys changed, the way a user would in an editor."""
    text = RECIPE.read_text(encoding="utf-8")
    changes = {
        "name_or_path: Qwen/Qwen2.5-7B": f"name_or_path: {model}",
        "path: tatsu-lab/alpaca": f"path: {folder / 'rows.jsonl'}",
        "num_train_epochs: 3": "num_train_epochs: 2",
    }
    for old, new in changes.items():
        assert text.count(f"  {old}") == 1, old
        text = text.replace(f"  {old}", f"  {new}")
    copy = folder / f"{model.name}.yaml"
    copy.write_text(text, encoding="utf-8")
    return copy


def write_rows(folder: Path) -> None:
    """Write Alpaca rows of various lengths, the longest beyond the tiny Gemma2's sliding window."""
    rows = []
    for number in range(NUM_ROWS):
        words = [WORDS[(number * 7 + place * 3) % len(WORDS)] for place in range(1 + number % 9)]
        rows.append({"instruction": "Count backwards.", "input": " ".join(words), "output": " ".join(words[::-1])})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_copy(recipe_path: Path, folder: Path) -> Any:
    """Train a recipe as finetune.py does and return what came out of it; the process group is there."""
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import load_tokenizer
    from tunebook.launching.world import World
    from tunebook.plan.plan import build_plan, with_split
    from tunebook.recipe.reading import load_recipe
    from tunebook.training.ready import build_run
    from tunebook.training.run import train

    recipe, world = load_recipe(str(recipe_path)), World()
    plan = build_plan(recipe, world, run_dir=str(folder / "runs" / recipe.stem))
    tokenizer = load_tokenizer(recipe.model.name_or_path)
    data = prepare_data(recipe, tokenizer)
    plan = with_split(plan, data.num_train_rows, data.num_eval_rows, {})
    return train(build_run(recipe, plan, world, tokenizer, data))


def describe(result: Any) -> dict[str, Any]:
    """Return what a test asks of one run, as plain values."""
    import bitsandbytes
    import torch

    model, plan, data = result.run.model, result.run.plan, result.run.data
    base = model.get_base_model()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    kinds = {name: type(module).__name__ for name, module in base.named_modules()}
    quantised = [name for name, module in base.named_modules() if type(module) is bitsandbytes.nn.Linear4bit]
    lora_b = {name: float(value.detach().abs().max()) for name, value in model.named_parameters() if "lora_B" in name}
    config = json.loads((Path(plan.adapter_dir) / "adapter_config.json").read_text(encoding="utf-8"))
    ids = torch.tensor([max(data.train["input_ids"], key=len)])
    live = logits(model, ids)
    with torch.no_grad(), model.disable_adapter():
        bare = logits(model, ids)
    loaded = logits(load_back(result), ids)
    return {
        "steps": result.summary.num_optimizer_steps,
        "losses": [result.summary.first_loss, result.summary.final_loss],
        "rate": plan.learning_rate,
        "targets": config["target_modules"],
        "found": sorted(model.targeted_module_names),
        "untrained": sorted(name for name, largest in lora_b.items() if largest == 0),
        "four_bit": sorted(name.removesuffix(".base_layer") for name in quantised),
        "head": type(head).__name__,
        "embedding": type(embedding).__name__,
        "tied": head.weight is embedding.weight,
        "attention": base.config._attn_implementation,
        "notes": list(plan.notes),
        "planned": [plan.model_parameters, plan.trainable_parameters],
        "counted": [
            sum(value.numel() for value in unquantised(result).parameters()),
            sum(value.numel() for value in model.parameters() if value.requires_grad),
        ],
        "head_norms": sorted({name.rpartition(".")[2] for name in kinds if name.endswith(("q_norm", "k_norm"))}),
        "largest_logit": float(live.abs().max()),
        "longest_row": int(ids.shape[1]),
        "difference": float((live - loaded).abs().max()),
        "moved": float((live - bare).abs().max()),
        "pad": result.run.tokenizer.pad_token,
        "stop": result.run.tokenizer.convert_ids_to_tokens(data.stop_token_id),
        "template": data.template,
    }


def logits(model: Any, ids: Any) -> Any:
    """Return logits under autocast, as in training: without it the adapter's float32 would be rounded elsewhere."""
    import torch

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model.eval()(input_ids=ids, use_cache=False).logits.float()


def load_back(result: Any) -> Any:
    """Load the adapter as a stranger would, onto a fresh NF4 base, with nothing of tunebook's but its CPU guard."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from tunebook.model.model import keep_4bit_weights

    given = {**result.run.recipe.quantization, "bnb_4bit_compute_dtype": torch.bfloat16}
    base = AutoModelForCausalLM.from_pretrained(
        result.run.recipe.model.name_or_path, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**given)
    )
    keep_4bit_weights(base)
    return PeftModel.from_pretrained(base, result.run.plan.adapter_dir)


def unquantised(result: Any) -> Any:
    """Return the base on the meta device: 4-bit weights would be counted by halves."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(result.run.recipe.model.name_or_path))


def main(folder: Path) -> None:
    """Build, train and describe every architecture in this process, and write what was found."""
    from accelerate.state import AcceleratorState

    from tunebook.errors import Refused
    from tunebook.launching.process_group import process_group
    from tunebook.launching.world import World
    from tunebook.system.quiet import quiet_libraries

    write_rows(folder)
    found: dict[str, Any] = {}
    for name in ARCHITECTURES:
        began = time.monotonic()
        with quiet_libraries():
            recipe = copy_recipe(folder, build_architecture(name, folder / name))
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            with process_group(World()):
                result = train_copy(recipe, folder)
            with quiet_libraries():
                found[name] = describe(result)
        except Refused as refused:
            found[name] = {"refused": refused.render()}
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    (folder / "found.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
