"""The model of a run: the base in the precision of the plan, on this process's own device, and LoRA on it.

What is kept in which type: a base that is not trained (LoRA, QLoRA) is held in the compute type, its linear layers in 4
or 8 bits where the recipe quantises; everything that is trained is held in float32, the base of a full fine-tune as
well, and mixed precision computes it in the compute type. Small steps would be lost in 16-bit weights.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from tunebook.errors import Problem, Refused, is_out_of_memory
from tunebook.launching.world import World
from tunebook.model.attention import find_position_problems
from tunebook.model.base_checks import find_base_problems
from tunebook.model.lora_reach import whole_modules
from tunebook.model.lora_targets import chosen_targets
from tunebook.model.mutated_start import changes_base, keep_start
from tunebook.model.new_tokens import make_room, start_rows, trained_rows
from tunebook.model.shares import adapter_notes, quantisation_notes, skipped_modules
from tunebook.plan.plan import Plan
from tunebook.recipe.schema import Recipe
from tunebook.system.places import check_model_path, is_local, local_path
from tunebook.system.quiet import quiet_libraries

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def build_model(recipe: Recipe, plan: Plan, world: World, tokenizer: Any) -> Any:
    """Return the model to train on this process's device: a PeftModel, or the bare model for a full fine-tune.

    The adapter starts from weights that depend on the recipe's seed alone: not on rank, world or quantisation (a 16-bit
    compute type rounds the same draw). Raises Refused, before weights are read wherever that is
    possible, when the base cannot be found or loaded, when it doesn't fit the tokenizer, or when `lora` names what it
    doesn't have.
    """
    with quiet_libraries():
        architecture = load_architecture(recipe)
        check_base(recipe, architecture, tokenizer)
        base = load_base(recipe, plan, world)
        _start_new_tokens(base, recipe, tokenizer)
        model = base if recipe.lora is None else _add_adapter(base, recipe, _with_new_tokens(base, recipe, tokenizer))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.config.use_cache = False
    return model


def load_architecture(recipe: Recipe) -> Any:
    """Return the transformers config of the base; raise Refused when it is missing, unreachable or unknown."""
    name = recipe.model.name_or_path
    if problems := check_model_path(name):
        raise Refused([replace(problem, where=recipe.path) for problem in problems])
    if is_local(name) and not any((local_path(name) / file).is_file() for file in WEIGHT_FILES):
        raise _refusal(recipe, f"no weights in {name}", f"It needs one of {', '.join(WEIGHT_FILES)}")
    with _refusing(recipe, "cannot be read"):
        return AutoConfig.from_pretrained(_source(recipe), revision=_revision(recipe))


def check_base(recipe: Recipe, architecture: Any, tokenizer: Any) -> Any:
    """Build the model without weights and raise Refused with every reason why this recipe cannot train it.

    Returns the model as it will be, with its adapter.
    """
    hollow = build_hollow(recipe, architecture)
    if problems := find_base_problems(recipe, architecture, hollow, tokenizer):
        raise Refused(problems)
    if recipe.lora is None:
        return hollow
    if recipe.model.add_special_tokens:
        make_room(hollow, tokenizer)
    return _rehearse_adapter(hollow, recipe, _with_new_tokens(hollow, recipe, tokenizer))


def find_model_problems(
    recipe: Recipe, plan: Plan, tokenizer: Any, longest_row: int, with_adapter: bool = True
) -> tuple[list[Problem], list[str]]:
    """Return why this recipe cannot train the model on rows up to `longest_row` tokens, and what is worth knowing.

    No weights are read. `with_adapter` puts LoRA on the model as well, for which peft takes seconds to import. A model
    that is not here, or only in part, is no problem yet: loading it will say what is wrong.
    """
    try:
        with quiet_libraries():
            architecture = load_architecture(recipe)
            hollow = build_hollow(recipe, architecture)
            problems = find_base_problems(recipe, architecture, hollow, tokenizer)
            micro_batch = 1 if recipe.chooses_micro_batch else plan.per_device_train_batch_size
            problems += find_position_problems(recipe, hollow.config, longest_row, micro_batch)
            if problems or not with_adapter:
                return problems, []
            notes = quantisation_notes(hollow, recipe.quantization, plan.compute_dtype)
            return [], notes + adapter_notes(check_base(recipe, architecture, tokenizer), recipe.lora)
    except Refused as refused:
        return (list(refused.problems) if is_local(recipe.model.name_or_path) else []), []


def find_model_notes(recipe: Recipe, plan: Plan, model: Any) -> list[str]:
    """Return how much of a loaded model is quantised and gets LoRA, where it is not all that it seems."""
    return quantisation_notes(model, recipe.quantization, plan.compute_dtype) + adapter_notes(model, recipe.lora)


def build_hollow(recipe: Recipe, architecture: Any) -> Any:
    """Return the model that a transformers config describes on the meta device: all modules, no weights."""
    with _refusing(recipe, "cannot be built"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(architecture), attn_implementation=recipe.model.attn_implementation
        )


def build_outline(recipe: Recipe, tokenizer: Any) -> Any:
    """Return the model of a run on the meta device: with its adapter and all that is saved of it but weights.

    For starts that change the base (`changes_base`) the base's own weights are needed: `build_model`.
    """
    from peft import get_peft_model

    assert recipe.lora is not None and not changes_base(recipe.lora)
    with quiet_libraries():
        hollow = build_hollow(recipe, load_architecture(recipe))
        # As from_pretrained does: a model without a file of these settings has those of its config.
        with contextlib.suppress(OSError):
            hollow.generation_config = GenerationConfig.from_pretrained(_source(recipe), revision=_revision(recipe))
        if recipe.model.add_special_tokens:
            make_room(hollow, tokenizer)
        lora = _with_new_tokens(hollow, recipe, tokenizer)
        # Nothing is drawn: some starts are made from the base's weights, and trained ones take the place of all.
        model = get_peft_model(hollow, _lora_config({**lora, "init_lora_weights": False}), low_cpu_mem_usage=True)
        model.peft_config["default"].init_lora_weights = lora.get("init_lora_weights", True)
    return model


def keep_4bit_weights(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on CPUs with AVX512-BF16 when a model in eval mode reads them.

    The packed form rounds the scales to bfloat16, computes in it, has no gradient, and stays for the training that
    follows: an evaluation would change the base and cut the gradient of every layer below it (bitsandbytes 0.50,
    Linear4bit.forward).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def load_base(recipe: Recipe, plan: Plan, world: World) -> Any:
    """Return the base in the precision of the plan, quantised where the recipe says so, on this process's device.

    Raises Refused where transformers cannot load it, or where the saved model lacks weights.
    """
    compute_dtype = getattr(torch, plan.compute_dtype)
    quantization = None
    if recipe.quantization is not None:
        given = {**recipe.quantization, "bnb_4bit_compute_dtype": compute_dtype}
        if skipped := skipped_modules(given):
            given["llm_int8_skip_modules"] = skipped
        quantization = BitsAndBytesConfig(**given)
    with _refusing(recipe, "cannot be loaded"):
        base, loading = AutoModelForCausalLM.from_pretrained(
            _source(recipe),
            revision=_revision(recipe),
            dtype=torch.float32 if recipe.lora is None else compute_dtype,
            quantization_config=quantization,
            # One whole copy on each process's own device; "auto" would spread it over the devices of all of them.
            device_map={"": world.device},
            attn_implementation=recipe.model.attn_implementation,
            output_loading_info=True,
        )
    if missing := sorted(loading["missing_keys"]):
        message = f"the saved model lacks {len(missing)} weights, {missing[0]} first; they would be random"
        raise _refusal(recipe, message, "Give a complete causal language model")
    keep_4bit_weights(base)
    return base


def _add_adapter(base: Any, recipe: Recipe, lora: Mapping[str, Any]) -> Any:
    from peft import get_peft_model

    # Seeded here, at the last moment: whatever was drawn before, on this rank or in this world, no longer matters.
    torch.manual_seed(recipe.seed)
    with _refusing(recipe, "cannot take this adapter", key="lora"):
        model = get_peft_model(base, _lora_config(lora))
    if changes_base(lora):
        keep_start(model)
    return model


def _start_new_tokens(base: Any, recipe: Recipe, tokenizer: Any) -> None:
    if tokens := recipe.model.add_special_tokens:
        make_room(base, tokenizer)
        start_rows(base, tokenizer.convert_tokens_to_ids(tokens))


def _with_new_tokens(base: Any, recipe: Recipe, tokenizer: Any) -> dict[str, Any]:
    """Return the `lora` section with the rows of added tokens among what is trained, where no whole layer is."""
    lora = dict(recipe.lora or {})
    if tokens := recipe.model.add_special_tokens:
        rows = trained_rows(base, tokenizer.convert_tokens_to_ids(tokens), whole_modules(base, lora))
        lora["trainable_token_indices"] = rows or None
    return lora


def _rehearse_adapter(hollow: Any, recipe: Recipe, lora: Mapping[str, Any]) -> Any:
    """Add the adapter to the model without weights, to hear peft's objections before the real ones load."""
    from peft import get_peft_model

    with _refusing(recipe, "cannot take this adapter", key="lora"):
        config = _lora_config(lora)
        if config.init_lora_weights not in (True, False, "gaussian"):
            # Other starts (PiSSA, OLoRA...) are drawn from the base's own weights, which are not there yet.
            config.init_lora_weights = True
        return get_peft_model(hollow, config, low_cpu_mem_usage=True)


def _lora_config(lora: Mapping[str, Any]) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{**copy.deepcopy(dict(lora)), "target_modules": chosen_targets(lora), "task_type": "CAUSAL_LM"})


def check_positions(recipe: Recipe, model: Any, longest_row: int, micro_batch: int) -> None:
    """Raise Refused where a row is longer than the positions that the model knows, or than a micro-batch may mix."""
    if problems := find_position_problems(recipe, model.config, longest_row, micro_batch):
        raise Refused(problems)


def _source(recipe: Recipe) -> str:
    name = recipe.model.name_or_path
    return str(local_path(name)) if is_local(name) else name


def _revision(recipe: Recipe) -> str:
    return recipe.model.revision or "main"


def _refusal(recipe: Recipe, message: str, fix: str = "", key: str = "model.name_or_path") -> Refused:
    return Refused(Problem(message, fix, recipe.path, key))


def first_words(error: Exception) -> str:
    """Return what the libraries say first of a model that cannot be loaded, or what they mean by it."""
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config.json says"
    return ". ".join(" ".join(str(error).split()).split(". ")[:2]).rstrip(".")


@contextlib.contextmanager
def _refusing(recipe: Recipe, what: str, key: str = "model.name_or_path") -> Iterator[None]:
    """Turn what the libraries raise about a user's input into a refusal of one line, with their own first words."""
    try:
        yield
    except Refused:
        raise
    except (
        OSError,
        ValueError,
        ImportError,
        LookupError,
        TypeError,
        RuntimeError,
        AssertionError,
        AttributeError,
        SafetensorError,
    ) as error:
        if is_out_of_memory(error):
            raise
        raise _refusal(recipe, f"{recipe.model.name_or_path} {what}: {first_words(error)}", key=key) from error
