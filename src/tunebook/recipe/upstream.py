"""The keys of Hugging Face's own classes, read from the installed source without importing it.

Importing TrainingArguments, LoraConfig and BitsAndBytesConfig takes 5 to 14 s; reading their source takes 0.1 s, so a
typo answers at once. Once a recipe is accepted the classes themselves confirm.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Optional, Union

# What an annotation becomes when it names a class that YAML cannot write; only null is then accepted.
OPAQUE = type(None)
PLAIN = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list, "tuple": list, "Any": Any}


@dataclass(frozen=True)
class UpstreamKey:
    """One field of an upstream class: its name, its type as plain Python typing, and its default (None if computed)."""

    name: str
    annotation: Any
    default: Any


@cache
def training_keys() -> Mapping[str, UpstreamKey]:
    """Return the fields of transformers.TrainingArguments (114 in 5.24) by name."""
    enums = {**_enums("transformers", "trainer_utils.py"), **_enums("transformers", "training_args.py")}
    enums |= _enums("transformers", "debug_utils.py")
    keys = _dataclass_keys("transformers", "training_args.py", "TrainingArguments", enums)
    levels = Literal["debug", "info", "warning", "error", "critical", "passive"]
    reports: Any = Literal[(*reporting_integrations(), "all", "none")]
    modes = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    typed: dict[str, Any] = {
        "log_level": levels,
        "log_level_replica": levels,
        "report_to": Optional[Union[reports, list[reports]]],
        "debug": Literal["underflow_overflow"],
        "torch_compile_mode": Optional[modes],
        # Neither changes the result, so that the program may choose.
        "per_device_train_batch_size": Union[int, Literal["auto"]],
        **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), Union[bool, Literal["auto"]]),
        # The class also takes JSON text here; a recipe writes a mapping.
        **{name: Optional[dict] for name in keys if name.endswith("_kwargs")},
    }
    return {name: UpstreamKey(name, typed.get(name, key.annotation), key.default) for name, key in keys.items()}


@cache
def lora_keys() -> Mapping[str, UpstreamKey]:
    """Return the fields of peft.LoraConfig by name, without those that say what the adapter is for."""
    keys = _dataclass_keys("peft", "tuners/lora/config.py", "LoraConfig", {})
    # One of the names is a pattern, pissa_niter_[number of iters], so the names are checked with the contradictions.
    start = UpstreamKey("init_lora_weights", Union[bool, str], keys["init_lora_weights"].default)
    return {**keys, "init_lora_weights": start}


@cache
def quantization_keys() -> Mapping[str, UpstreamKey]:
    """Return the arguments of transformers.BitsAndBytesConfig by name.

    Its signature has no annotations, so types come from the defaults, and from the docstring where the default is None.
    """
    tree = _class("transformers", "utils/quantization_config.py", "BitsAndBytesConfig")
    signature = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__").args
    names = [argument.arg for argument in signature.args][1:]
    defaults = dict(
        zip(reversed(names), (ast.literal_eval(node) for node in reversed(signature.defaults)), strict=False)
    )
    dtypes = Literal["float16", "float32", "int8", "uint8", "float64", "bfloat16"]
    typed: dict[str, Any] = {
        "llm_int8_skip_modules": Optional[list[str]],
        "bnb_4bit_compute_dtype": Optional[Literal["float32", "bfloat16", "float16"]],
        "bnb_4bit_quant_type": Literal["nf4", "fp4"],
        "bnb_4bit_quant_storage": Optional[dtypes],
    }
    return {name: UpstreamKey(name, typed.get(name, type(default)), default) for name, default in defaults.items()}


@cache
def reporting_integrations() -> tuple[str, ...]:
    """Return the names that `report_to` knows in the installed transformers."""
    for node in _tree("transformers", "integrations/integration_utils.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTEGRATION_TO_CALLBACK":
            assert isinstance(node.value, ast.Dict)
            return tuple(ast.literal_eval(key) for key in node.value.keys if key is not None)
    raise AssertionError("transformers no longer has INTEGRATION_TO_CALLBACK")


def installed(package: str) -> str:
    """Return `package version`, for messages."""
    return f"{package} {version(package)}"


@cache
def _tree(package: str, file: str) -> ast.Module:
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))


def _class(package: str, file: str, name: str) -> ast.ClassDef:
    return next(node for node in _tree(package, file).body if isinstance(node, ast.ClassDef) and node.name == name)


def _enums(package: str, file: str) -> dict[str, Any]:
    """Return each string enum of a module as a Literal of its values."""
    enums: dict[str, Any] = {}
    for node in _tree(package, file).body:
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            values = [ast.literal_eval(item.value) for item in node.body if isinstance(item, ast.Assign)]
            enums[node.name] = Literal[tuple(values)]
    return enums


def _dataclass_keys(package: str, file: str, name: str, enums: Mapping[str, Any]) -> dict[str, UpstreamKey]:
    keys = {}
    for node in _class(package, file, name).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        keyword = {item.arg: item.value for item in node.value.keywords} if isinstance(node.value, ast.Call) else {}
        if ast.unparse(keyword.get("init", ast.Constant(True))) == "False":
            continue
        annotation = _annotation(node.annotation, enums)
        choices = _choices(keyword.get("metadata"))
        if choices:
            annotation = Optional[choices] if OPAQUE in getattr(annotation, "__args__", ()) else choices
        keys[node.target.id] = UpstreamKey(node.target.id, annotation, _default(keyword.get("default")))
    return keys


def _default(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _choices(metadata: ast.expr | None) -> Any:
    if not isinstance(metadata, ast.Dict):
        return None
    for key, value in zip(metadata.keys, metadata.values, strict=True):
        if key is not None and ast.unparse(key) == "'choices'" and isinstance(value, ast.List):
            return Literal[tuple(ast.literal_eval(value))]
    return None


def _annotation(node: ast.expr, enums: Mapping[str, Any]) -> Any:  # noqa: PLR0911 - one case a line
    """Turn an annotation into plain typing; `SomeEnum | str` becomes the enum's values, as the class converts them."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str() as text):
            return _annotation(ast.parse(text, mode="eval").body, enums)
        case ast.Name(id=name):
            return PLAIN.get(name, enums.get(name, OPAQUE))
        case ast.BinOp(left=left, right=right):
            return _union([left, right], enums)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return Optional[_annotation(inner, enums)]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            return _union(members, enums)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = ast.literal_eval(inner)
            return Literal[values if isinstance(values, tuple) else (values,)]
        case ast.Subscript(value=ast.Name(id="dict" | "tuple" as name)):
            return PLAIN[name]
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return list[_annotation(inner, enums)]  # type: ignore[misc]
    return OPAQUE


def _union(members: list[ast.expr], enums: Mapping[str, Any]) -> Any:
    names = {ast.unparse(member) for member in members}
    kept = [member for member in members if not (names & enums.keys() and ast.unparse(member) == "str")]
    return Union[tuple(_annotation(member, enums) for member in kept)]
