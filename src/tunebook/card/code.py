"""The code on a model card: how what was trained is loaded as it was trained, and asked as it was trained."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from tunebook.card.public_text import last_part
from tunebook.data.prompts import ALPACA_WITHOUT_INPUT, AlpacaPrompts
from tunebook.recipe.schema import Recipe

Kind = Literal["adapter", "model", "merged"]
PLAIN_TEXT = "nothing: plain text"
QUESTION = "Name three primary colours."
FOLDER = "path"


def render_loading(recipe: Recipe, summary: Mapping[str, Any], kind: Kind, folder: str) -> str:
    """Return Python that loads tokenizer and model; `folder` is where they are, seen from the card."""
    dtype = f"torch.{summary['compute_dtype']}"
    if kind != "adapter":
        return "\n".join([
            "import torch",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'{FOLDER} = "{folder}"  # or the name of this model on the Hub',
            f"tokenizer = AutoTokenizer.from_pretrained({FOLDER})",
            f'model = AutoModelForCausalLM.from_pretrained({FOLDER}, dtype="auto")'
            if kind == "merged"
            else f"model = AutoModelForCausalLM.from_pretrained({FOLDER}, dtype={dtype})",
        ])  # fmt: skip
    quantised = recipe.quantization is not None
    names = ["AutoTokenizer", "GenerationConfig", *(["BitsAndBytesConfig"] if quantised else [])]
    options = [f"dtype={dtype}", *(["quantization_config=quantization"] if quantised else [])]
    public = summary.get("public_base")
    lines = ["import torch", "from peft import " + ("AutoPeftModelForCausalLM" if public else "PeftModel")]
    names += [] if public else ["AutoModelForCausalLM"]
    lines += [f"from transformers import {', '.join(sorted(names))}", ""]
    lines += [f'{FOLDER} = "{folder}"  # or the name of this adapter on the Hub']
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({FOLDER})"]
    lines += [_quantization(recipe.quantization, dtype)] if recipe.quantization is not None else []
    lines += _named_base(options) if public else _unnamed_base(recipe, summary, options)
    # transformers takes these settings from the base, which may stop elsewhere.
    return "\n".join([*lines, f"model.generation_config = GenerationConfig.from_pretrained({FOLDER})"])


def _quantization(given: Mapping[str, Any], dtype: str) -> str:
    values = {**given, "bnb_4bit_compute_dtype": None}
    if not given.get("load_in_4bit"):
        values.pop("bnb_4bit_compute_dtype")
    words = [f"{name}={dtype if name == 'bnb_4bit_compute_dtype' else repr(value)}" for name, value in values.items()]
    return f"quantization = BitsAndBytesConfig({', '.join(words)})"


def _named_base(options: list[str]) -> list[str]:
    return [f"model = AutoPeftModelForCausalLM.from_pretrained({FOLDER}, {', '.join(options)})"]


def _unnamed_base(recipe: Recipe, summary: Mapping[str, Any], options: list[str]) -> list[str]:
    base = json.dumps(last_part(str(summary["model"])), ensure_ascii=False)
    lines = [f"base = AutoModelForCausalLM.from_pretrained({base}, {', '.join(options)})  # the folder of the base"]
    if recipe.model.add_special_tokens:
        lines += [
            "if len(tokenizer) > base.get_input_embeddings().num_embeddings:",
            "    base.resize_token_embeddings(len(tokenizer))  # room for the new tokens",
        ]
    return [*lines, f"model = PeftModel.from_pretrained(base, {FOLDER})"]


def render_asking(template: str) -> str:
    """Return Python that prompts the loaded model as its rows were prompted, and prints the answer."""
    if template == PLAIN_TEXT:
        inputs = ['inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)']
    elif template == AlpacaPrompts.name:
        prompt = ALPACA_WITHOUT_INPUT.format(instruction=QUESTION)
        inputs = [f"prompt = {prompt!r}", 'inputs = tokenizer(prompt, return_tensors="pt").to(model.device)']
    else:
        inputs = [
            f'messages = [{{"role": "user", "content": "{QUESTION}"}}]',
            'options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}',
            "inputs = tokenizer.apply_chat_template(messages, **options).to(model.device)",
        ]
    return "\n".join([
        *inputs,
        "output = model.generate(**inputs, max_new_tokens=256, do_sample=False)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ])  # fmt: skip


def prompt_note(template: str) -> str:
    """Return what is said of how the rows were prompted."""
    if template == PLAIN_TEXT:
        return "It was trained on plain texts, without a template, and goes on with a text:"
    if template == AlpacaPrompts.name:
        return "It was trained on this prompt (the Alpaca text), not on a chat template:"
    return "It was trained on the chat template that is saved with its tokenizer:"
