"""The JSON schema of recipes: current, true to the reader, and kept by what is shipped."""

import json
import re

import pytest
from jsonschema import Draft7Validator

from checkout import ROOT
from tunebook.commands.new_recipe import with_schema
from tunebook.errors import Refused
from tunebook.recipe.json_schema import build_schema
from tunebook.recipe.names import SECTIONS, known_keys
from tunebook.recipe.reading import load_recipe
from tunebook.recipe.source import read_source

FILE = ROOT / "schema" / "recipe.schema.json"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BASE = {"model": {"name_or_path": "a/b"}, "data": {"path": "c/d"}}


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def test_the_schema_is_current():
    current = json.dumps(build_schema(), indent=1) + "\n"
    assert FILE.read_text(encoding="utf-8") == current, "run python scripts/make_recipe_schema.py"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_keeps_the_schema_and_names_it(validator, recipe):
    assert not list(validator.iter_errors(read_source(str(recipe)).values))
    [named] = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", recipe.read_text(encoding="utf-8"), flags=re.M)
    assert (recipe.parent / named).resolve() == FILE


def test_a_copy_elsewhere_names_the_same_schema(tmp_path):
    text = RECIPES[0].read_text(encoding="utf-8")
    moved = with_schema(text, RECIPES[0], tmp_path / "mine.yaml")
    [named] = re.findall(r"\$schema=(\S+)", moved)
    assert (tmp_path / named).resolve() == FILE
    assert with_schema(text, RECIPES[0], RECIPES[0].parent / "mine.yaml") == text
    lost = text.replace("../schema/", "nowhere/")
    assert with_schema(lost, RECIPES[0], tmp_path / "mine.yaml") == lost


def test_every_key_that_a_recipe_can_hold_is_there_and_described(validator):
    for section in SECTIONS:
        properties = validator.schema["properties"][section]["properties"]
        assert set(properties) == {name for name, kind in known_keys(section).items() if kind is not type(None)}
        assert all(schema["description"] for schema in properties.values())


def values(section: str, key: str, value: object) -> dict:
    return {**BASE, section: {**BASE.get(section, {}), key: value}}


def accepts(recipe: dict, tmp_path) -> bool:
    if "quantization" in recipe:
        recipe = {**recipe, "lora": {}}
    (tmp_path / "case.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    try:
        load_recipe(str(tmp_path / "case.yaml"))
    except Refused:
        return False
    return True


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "learning_rate", 2e-4),
        ("training", "learning_rate", 1),
        ("training", "num_train_epochs", 3),
        ("training", "warmup_steps", 0.03),
        ("training", "save_strategy", "no"),
        ("training", "save_strategy", False),
        ("training", "optim", "paged_adamw_8bit"),
        ("training", "report_to", "none"),
        ("training", "lr_scheduler_kwargs", {"num_cycles": 2}),
        ("training", "gradient_checkpointing", True),
        ("training", "global_batch_size", 64),
        ("lora", "target_modules", "all-linear"),
        ("lora", "target_modules", ["q_proj"]),
        ("lora", "init_lora_weights", "pissa"),
        ("lora", "init_lora_weights", False),
        ("lora", "rank_pattern", {"q_proj": 4}),
        ("quantization", "load_in_4bit", True),
        ("model", "add_special_tokens", ["<|tool|>"]),
        ("model", "dtype", "bfloat16"),
        ("data", "max_length", 2),
        ("data", "columns", {"prompt": "question", "response": "answer"}),
    ],
)
def test_what_the_reader_takes_the_schema_takes(validator, tmp_path, section, key, value):
    recipe = values(section, key, value)
    assert accepts(recipe, tmp_path)
    assert not [error.message for error in validator.iter_errors(recipe)]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "learning_rte", 1e-4),
        ("training", "learning_rate", "fast"),
        ("training", "learning_rate", -1),
        ("training", "learning_rate", True),
        ("training", "save_strategy", "sometimes"),
        ("training", "per_device_train_batch_size", 0),
        ("training", "per_device_train_batch_size", 1.5),
        ("training", "output_dir", "out"),
        ("training", "bf16", "yes"),
        ("training", "optim", "adam"),
        ("lora", "r", 0),
        ("lora", "lora_dropout", 1),
        ("lora", "eva_config", {"rho": 2}),
        ("lora", "target_modules", {"q_proj": 1}),
        ("quantization", "bnb_4bit_quant_type", "nf5"),
        ("model", "name_or_path", ""),
        ("model", "dtype", "int8"),
        ("model", "add_special_tokens", []),
        ("data", "max_length", 1),
        ("data", "validation", 1.0),
        ("data", "sources", []),
        ("hub", "repository", "a/b"),
        ("hub", "private", "so"),
    ],
)
def test_what_the_schema_marks_the_reader_refuses(validator, tmp_path, section, key, value):
    recipe = values(section, key, value)
    assert list(validator.iter_errors(recipe))
    assert not accepts(recipe, tmp_path)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_left_empty_is_marked_and_refused(validator, tmp_path, section):
    file = tmp_path / "case.yaml"
    others = {name: value for name, value in BASE.items() if name != section}
    file.write_text(f"{section}:\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in others.items()))
    assert list(validator.iter_errors(read_source(str(file)).values))
    with pytest.raises(Refused, match="the section is empty"):
        load_recipe(str(file))


@pytest.mark.parametrize("section", ["lora", "training"])
def test_a_section_of_defaults_is_taken_by_both(validator, tmp_path, section):
    assert accepts({**BASE, section: {}}, tmp_path) and not list(validator.iter_errors({**BASE, section: {}}))


@pytest.mark.parametrize(
    "recipe", [{}, {"model": BASE["model"]}, {"data": BASE["data"]}, {**BASE, "data": {}}, {**BASE, "model": None}]
)
def test_a_recipe_without_model_or_data_is_marked(validator, tmp_path, recipe):
    assert list(validator.iter_errors(recipe)) and not accepts(recipe, tmp_path)
