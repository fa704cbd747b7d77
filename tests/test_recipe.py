"""Reading recipes: what is accepted, what is refused, and how it is said."""

import subprocess
import sys
import textwrap

import pytest

from tunebook.errors import Refused
from tunebook.recipe.reading import load_recipe, write_resolved
from tunebook.recipe.rules import REFUSED
from tunebook.recipe.upstream import lora_keys, quantization_keys, training_keys

BASE = """\
model:
  name_or_path: org/tiny
data:
  path: org/rows
  validation: 0.1
lora:
  r: 4
training:
  max_steps: 1
"""


@pytest.fixture
def recipe(tmp_path):
    """Write BASE with lines added to its last section, or another text, and return the path."""

    def write(*training_lines: str, text: str = BASE) -> str:
        path = tmp_path / "case.yaml"
        path.write_text(text + "".join(f"  {line}\n" for line in training_lines), encoding="utf-8")
        return str(path)

    return write


def problems(path: str, *overrides: str) -> list[str]:
    with pytest.raises(Refused) as refused:
        load_recipe(path, overrides)
    return [problem.render() for problem in refused.value.problems]


def only_problem(path: str, *overrides: str) -> str:
    found = problems(path, *overrides)
    assert len(found) == 1, found
    return found[0]


# Y01: numbers, however they are written


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-4", 1e-4), ("2e-5", 2e-5), ("5e-05", 5e-5), ("1.e-4", 1e-4), ("'1e-4'", 1e-4), ("1", 1.0), (".5", 0.5)],
)
def test_y01_every_form_of_a_number_is_one(recipe, written, value):
    accepted = load_recipe(recipe(f"learning_rate: {written}"))
    assert accepted.arguments["learning_rate"] == value
    assert isinstance(accepted.arguments["learning_rate"], float)
    assert accepted.resolved["training"]["learning_rate"] == value


@pytest.mark.parametrize("key", ["learning_rate", "weight_decay", "num_train_epochs", "max_grad_norm", "adam_epsilon"])
@pytest.mark.parametrize("written", ["fast", "true", "[1]", "{a: 1}", ".nan", ".inf", "'1e'", "1,5"])
def test_y01_what_is_no_number_is_refused_with_key_value_and_type(recipe, key, written):
    text = BASE.replace("  max_steps: 1\n", "  logging_steps: 5\n")
    message = only_problem(recipe(f"{key}: {written}", text=text))
    assert f"training.{key}" in message and ":10" in message and "number" in message


def test_numbers_in_every_section_are_read_the_same_way(recipe):
    text = BASE.replace("r: 4", "r: '4'\n  lora_dropout: '1e-1'").replace("0.1", "'1e-1'")
    accepted = load_recipe(recipe(text=text))
    assert accepted.lora == {"r": 4, "lora_dropout": 0.1}
    assert accepted.data.validation == 0.1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("seed: true", "got true"),
        ("seed: 8.0", "written 8"),
        ("seed: 1_000", "without separators"),
        ("torch_compile: 'false'", "true or false without quotes"),
        ("torch_compile: yes", "true or false"),
        ("torch_compile: 1", "true or false"),
        ("metric_for_best_model: 3", "in quotes"),
        ("ddp_timeout:", "got nothing"),
        ("optim: adamw", "nearest: adamw_torch"),
        ("lr_scheduler_type: cosin", "nearest: cosine"),
        ("logging_strategy: step", "nearest: steps"),
        ("lr_scheduler_kwargs: '{}'", "a mapping"),
        ("ddp_backend: nccll", "nearest: nccl"),
    ],
)
def test_a_wrong_type_says_what_was_got_and_what_is_allowed(recipe, line, said):
    message = only_problem(recipe(line))
    assert said in message and ":10" in message and f"training.{line.partition(':')[0]}" in message


# Y03: words that YAML 1.1 makes into booleans


@pytest.mark.parametrize("word", ["no", "off", "No", "OFF", "false", "none", "'no'"])
@pytest.mark.parametrize("key", ["save_strategy", "eval_strategy", "logging_strategy"])
def test_y03_no_is_the_word_where_the_word_is_legal(recipe, key, word):
    assert load_recipe(recipe(f"{key}: {word}")).arguments[key] == "no"


@pytest.mark.parametrize("word", ["no", "off", "false", "none", "null", "[]"])
def test_y03_report_to_no_is_nothing(recipe, word):
    assert load_recipe(recipe(f"report_to: {word}")).arguments["report_to"] in ("none", None, [])


def test_y03_bias_no_is_none(recipe):
    assert load_recipe(recipe(text=BASE.replace("r: 4", "bias: no"))).lora == {"bias": "none"}


def test_y03_a_word_that_is_not_legal_is_refused(recipe):
    assert "no, steps, epoch, best" in only_problem(recipe("save_strategy: yes"))


# Y05: unknown keys


def test_y05_every_unknown_key_is_listed_with_line_and_nearest_name(recipe):
    found = problems(recipe("learning_rte: 1.0e-3", "num-train-epochs: 3", "loraR: 8"))
    assert [message.split(": ")[0].rpartition(":")[2] for message in found] == ["10", "11", "12"]
    assert "learning_rte" in found[0] and "learning_rate" in found[0]
    assert "num-train-epochs" in found[1] and "num_train_epochs" in found[1]
    assert "loraR" in found[2] and "lora.r" in found[2]


@pytest.mark.parametrize(
    ("section", "wrong", "right"),
    [
        ("model", "name_or_pth: x", "name_or_path"),
        ("model", "dtyp: float32", "dtype"),
        ("data", "max_lenght: 8", "max_length"),
        ("data", "Path: x", "path"),
        ("lora", "lora_alfa: 8", "lora_alpha"),
        ("lora", "targetModules: [q_proj]", "target_modules"),
        ("quantization", "load_in_4bits: true", "load_in_4bit"),
        ("quantization", "bnb_4bit_double_quant: true", "bnb_4bit_use_double_quant"),
        ("training", "gradient_acumulation_steps: 2", "gradient_accumulation_steps"),
        ("training", "globalBatchSize: 8", "global_batch_size"),
    ],
)
def test_unknown_keys_of_every_section_have_a_nearest_name(recipe, section, wrong, right):
    text = BASE + "quantization:\n  load_in_4bit: true\n"
    text = text.replace(f"{section}:\n", f"{section}:\n  {wrong}\n")
    message = only_problem(recipe(text=text))
    assert wrong.partition(":")[0] in message and right in message


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("learning_rate: 1", "training"),
        ("lora_r: 4", "lora.r"),
        ("max_length: 4", "data"),
        ("load_in_4bit: true", "quant"),
    ],
)
def test_flat_keys_are_told_their_section(recipe, line, place):
    assert place in only_problem(recipe(text=BASE + line + "\n"))


def test_unknown_sections_are_refused(recipe):
    assert "training" in only_problem(recipe(text=BASE + "trainig: {seed: 1}\n"))


# Y07: duplicate keys


def test_y07_duplicates_name_key_and_lines(recipe):
    text = "model:\n  name_or_path: a/b\ndata:\n  path: a/b\n  max_length: 64\n  validation: 0.1\n  max_length: 128\n"
    message = only_problem(recipe(text=text))
    assert "max_length" in message and "lines 5 and 7" in message


def test_duplicates_of_sections_and_inside_values_are_found_too(recipe):
    text = BASE + "  lr_scheduler_kwargs: {num_cycles: 1, num_cycles: 2}\ndata:\n  path: x/y\n"
    found = problems(recipe(text=text))
    assert "training.lr_scheduler_kwargs.num_cycles" in found[0] and "given 2 times" in found[0]
    assert ": data: is given 2 times, on lines 3 and 11" in found[1]


# Y09: names that libraries renamed


@pytest.mark.parametrize(
    ("line", "today"),
    [
        ("evaluation_strategy: epoch", "training.eval_strategy"),
        ("max_seq_length: 64", "data.max_length"),
        ("warmup_ratio: 0.1", "training.warmup_steps"),
        ("overwrite_output_dir: true", "--fresh"),
        ("no_cuda: true", "use_cpu"),
        ("torch_dtype: float32", "model.dtype"),
        ("logging_dir: x", "metrics.jsonl"),
        ("mixed_precision: bf16", "model.dtype"),
        ("per_gpu_train_batch_size: 4", "per_device_train_batch_size"),
        ("cutoff_len: 4", "data.max_length"),
        ("group_by_length: true", "remove it"),
    ],
)
def test_y09_old_and_foreign_names_say_what_replaced_them(recipe, line, today):
    assert today in only_problem(recipe(line))
    assert today in only_problem(recipe(text=BASE + line + "\n"))


def test_the_deprecated_alias_is_taken_with_a_note(recipe):
    accepted = load_recipe(recipe("gradient_checkpointing: false"))
    assert accepted.arguments["activation_checkpointing"] is False
    assert "gradient_checkpointing" not in accepted.arguments
    assert any("deprecated" in note for note in accepted.notes)
    message = only_problem(recipe("gradient_checkpointing: false", "activation_checkpointing: true"))
    assert "contradicts" in message


# Refused keys


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_every_refused_key_is_refused_with_a_reason(recipe, key):
    message = only_problem(recipe(f"{key}: hf_secret"))
    assert f"training.{key}" in message and REFUSED[key][0] in message and "hf_secret" not in message


def test_refused_keys_exist_upstream():
    assert set(REFUSED) <= set(training_keys())


def test_a_secret_on_the_command_line_is_never_printed(recipe):
    assert "hf_secret" not in only_problem(recipe(), "training.hub_token=hf_secret")


def test_every_other_argument_is_accepted_by_its_own_name(recipe):
    needed = {"optim_target_modules", "dataloader_prefetch_factor", "dataloader_persistent_workers", "report_to"}
    needed |= {"dataloader_multiprocessing_context", "max_steps", "gradient_checkpointing", "num_train_epochs"}
    needed |= {"gradient_checkpointing_kwargs"}
    for name, key in training_keys().items():
        if name in REFUSED or name in needed or key.default in (None, ""):
            continue
        written = str(key.default).lower() if isinstance(key.default, bool) else key.default
        assert load_recipe(recipe(f"{name}: {written}")).arguments[name] == key.default, name


# Ranges


@pytest.mark.parametrize(
    "line",
    [
        "seed: -1",
        "per_device_train_batch_size: 0",
        "gradient_accumulation_steps: -2",
        "learning_rate: -1e-4",
        "warmup_steps: -1",
        "adam_beta2: 1",
        "save_total_limit: 0",
        "global_batch_size: 0",
        "logging_steps: 0",
    ],
)
def test_values_out_of_range_are_refused(recipe, line):
    assert ":10" in only_problem(recipe(line))


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("data", "max_length: 1"),
        ("data", "validation: 1"),
        ("data", "format: alpaka"),
        ("lora", "r: 0"),
        ("lora", "lora_dropout: 1"),
        ("model", "dtype: float8"),
        ("model", "attn_implementation: flash"),
    ],
)
def test_values_out_of_range_in_other_sections(recipe, section, line):
    text = BASE.replace("  validation: 0.1\n", "").replace("  r: 4\n", "  lora_alpha: 4\n")
    text = text.replace(f"{section}:\n", f"{section}:\n  {line}\n")
    assert f"{section}.{line.partition(':')[0]}" in only_problem(recipe(text=text))


# Contradictions


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        (["global_batch_size: 8", "gradient_accumulation_steps: 2"], "gradient_accumulation_steps"),
        (["global_batch_size: 8", "per_device_train_batch_size: 3"], "per_device_train_batch_size"),
        (["global_batch_size: 8", "learning_rate_scaling: linear"], "learning_rate_scaling"),
        (["learning_rate_base_processes: 2"], "learning_rate_base_processes"),
        (["num_train_epochs: 1"], "max_steps"),
        (["bf16: true", "fp16: true"], "fp16"),
        (["save_strategy: no", "save_steps: 5"], "save_steps"),
        (["warmup_steps: 1.5"], "warmup_steps"),
        (["dataloader_prefetch_factor: 2"], "dataloader_prefetch_factor"),
        (["load_best_model_at_end: true", "save_strategy: steps"], "load_best_model_at_end"),
        (["activation_checkpointing_kwargs: {use_reentrant: true}"], "activation_checkpointing_kwargs"),
        (["report_to: clearml"], "report_to"),
        (["optim: galore_adamw"], "optim"),
    ],
)
def test_contradictions_name_the_key_to_change(recipe, lines, key):
    assert f"training.{key}" in only_problem(recipe(*lines))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (BASE.replace("lora:\n  r: 4\n", "quantization: {load_in_4bit: true}\n"), "quantization"),
        (BASE + "quantization: {load_in_4bit: true, load_in_8bit: true}\n", "quantization.load_in_8bit"),
        (BASE + "quantization: {bnb_4bit_quant_type: nf4}\n", "quantization"),
        (BASE + "quantization: {load_in_8bit: true, bnb_4bit_quant_type: nf4}\n", "quantization.bnb_4bit_quant_type"),
        (BASE + "quantization: {load_in_4bit: true, bnb_4bit_compute_dtype: float16}\n", "bnb_4bit_compute_dtype"),
        (
            BASE.replace("r: 4", "init_lora_weights: pissa") + "quantization: {load_in_4bit: true}\n",
            "init_lora_weights",
        ),
        (BASE.replace("r: 4", "target_modules: []"), "lora.target_modules"),
        (BASE.replace("name_or_path: org/tiny", "name_or_path: a/b\n  dtype: float32") + "  bf16: true\n", "bf16"),
        (BASE.replace("name_or_path: org/tiny", "name_or_path: a/b\n  dtype: bfloat16") + "  bf16: false\n", "bf16"),
        (BASE.replace("  validation: 0.1\n", "") + "  eval_strategy: epoch\n", "training.eval_strategy"),
        (BASE.replace("validation: 0.1", "answer_rows: 3"), "data.answer_rows"),
        (
            BASE.replace("validation: 0.1", "on_overflow: error\n  max_truncated_fraction: 0.1"),
            "data.max_truncated_fraction",
        ),
        (
            BASE.replace("validation: 0.1", "packing: true") + "  neftune_noise_alpha: 5\n",
            "training.neftune_noise_alpha",
        ),
    ],
)
def test_contradictions_between_sections(recipe, text, key):
    assert key in only_problem(recipe(text=text))


def test_precision_flags_that_agree_are_accepted(recipe):
    accepted = load_recipe(recipe("bf16: true"))
    assert accepted.model.dtype == "bfloat16" and any("model.dtype" in note for note in accepted.notes)
    assert load_recipe(recipe("bf16: false")).model.dtype == "auto"


def test_a_wrong_value_brings_no_second_report_that_follows_from_it(recipe):
    text = BASE + "quantization: {load_in_4bit: 'true'}\n"
    assert "without quotes" in only_problem(recipe(text=text))


def test_y11_an_environment_that_turns_off_what_the_recipe_asks_for(recipe, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DISABLED", "true")
    assert any("TENSORBOARD_DISABLED" in message for message in problems(recipe("report_to: tensorboard")))
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    assert any("unset TRACKIO_SPACE_ID" in message for message in problems(recipe("report_to: [trackio]")))


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(recipe, monkeypatch):
    monkeypatch.setattr("tunebook.recipe.contradictions.find_spec", lambda name: None)
    for name in ("tensorboard", "trackio"):
        assert f"pip install {name}" in only_problem(recipe(f"report_to: {name}"))
    assert "this machine alone" in only_problem(recipe("trackio_space_id: me/space"))


# The text itself


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", "holds no sections"),
        ("just text\n", "holds no sections"),
        ("model: {name_or_path: a/b\n", "is not YAML"),
        ("model:\n\tname_or_path: a\n", "is not YAML"),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
        (BASE + "quantization:\n", "the section is empty"),
        (BASE + "1: x\n", "is no key"),
        (
            BASE.replace("org/tiny", "&x org/tiny").replace("r: 4", "rank_pattern: &y {a: 1}\n  alpha_pattern: *y"),
            "alias",
        ),
        (BASE.replace("org/rows", "!!python/name:os.system ''"), "tag"),
        (BASE.replace("org/rows", "!secret x"), "tag"),
        (BASE.replace("lora:\n  r: 4", "lora: 3"), "expected a section"),
        (BASE.replace("  name_or_path: org/tiny\n", "  revision: main\n"), "model.name_or_path: is missing"),
        (BASE.replace("  path: org/rows\n", ""), "data.path: is missing"),
        (BASE.replace("org/rows", "''"), "data.path"),
        ("[" * 1000, "is not YAML"),
    ],
)
def test_text_that_is_no_recipe(recipe, text, said):
    assert said in only_problem(recipe(text=text))


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    assert "no such recipe" in only_problem(str(tmp_path / "missing.yaml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".hidden_qlora.yaml").touch()
    assert only_problem("tiny_qlora.yaml").endswith("Give the path of a .yaml file")
    (tmp_path / "recipes").mkdir()
    for name in ("tiny_qlora.yaml", "other.yaml"):
        (tmp_path / "recipes" / name).touch()
    assert only_problem("tiny_qlora.yaml").endswith("Did you mean recipes/tiny_qlora.yaml?")
    (tmp_path / "beside.yaml").touch()
    assert only_problem("tiny_qlora.yaml").endswith("Did you mean recipes/tiny_qlora.yaml?")
    assert only_problem("besides.yaml").endswith("Did you mean beside.yaml?")
    assert only_problem("x" * 200).endswith("Did you mean beside.yaml?")
    (tmp_path / "case.yaml").write_text(BASE)
    assert "case.yaml" in only_problem(str(tmp_path / "caze.yaml"))
    assert "is a folder" in only_problem(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"model: {name_or_path: \xe9}")
    assert "UTF-8" in only_problem(str(tmp_path / "latin.yaml"))


def test_windows_text_is_read(tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_recipe(str(path)).model.name_or_path == "org/tiny"


def test_yaml_1_2_values(recipe):
    text = BASE.replace("org/tiny", "org/tiny\n  revision: 2024-01-01").replace("r: 4", "r: 0x10")
    accepted = load_recipe(recipe(text=text))
    assert accepted.model.revision == "2024-01-01"
    assert accepted.lora == {"r": 16}


# Overrides


def test_overrides_are_checked_like_the_file_and_marked(recipe):
    accepted = load_recipe(
        recipe(), ["training.learning_rate=2e-4", "lora.target_modules=[q_proj, v_proj]", "lora.r=8"]
    )
    assert accepted.arguments["learning_rate"] == 2e-4
    assert accepted.lora == {"r": 8, "target_modules": ["q_proj", "v_proj"]}
    assert "training.learning_rate" in accepted.overridden and "training.max_steps" not in accepted.overridden


def test_a_section_is_dropped_with_null(recipe):
    text = BASE + "quantization: {load_in_4bit: true}\n"
    assert load_recipe(recipe(text=text), ["quantization=null"]).quantization is None
    assert load_recipe(recipe(text=text), ["quantization=null", "lora=null"]).lora is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.learning_rte=1", "learning_rate"),
        ("training.seed=", "no value"),
        ("learning_rate", "neither a recipe"),
        ("other.yaml", "one recipe"),
        ("training.seed=x", "whole number"),
        ("data.max_length=10000000000000000000000", "1000000000"),
        ("training.global_batch_size=100000000000000000000", "to 16777216"),
        ("training.num_train_epochs=1e308", "to a billion"),
        ("lora.r=1000000000000", "to a million"),
        ("training.seed=[1", "not a YAML value"),
        ("model=null", "model.name_or_path: is missing"),
        ("training=3", "expected a section"),
        ("lora.lora_r=3", "lora.r"),
    ],
)
def test_wrong_overrides(recipe, override, said):
    message = only_problem(recipe(), override)
    assert said in message
    assert "command line" in message or "missing" in message


def test_an_override_given_twice(recipe):
    assert "given twice" in only_problem(recipe(), "training.seed=1", "training.seed=2")


def test_an_override_mends_a_mistake_in_the_file(recipe):
    assert load_recipe(recipe("seed: x"), ["training.seed=3"]).seed == 3


def test_null_on_the_command_line_drops_a_key_whatever_its_type(recipe):
    written = recipe("seed: 7", "optim: sgd")
    words = ["training.max_steps=null", "training.num_train_epochs=2", "training.seed=null", "lora.r=null"]
    accepted = load_recipe(written, words)
    assert (accepted.arguments, accepted.lora) == ({"num_train_epochs": 2.0, "optim": "sgd"}, {})
    assert "data.path: is missing" in only_problem(written, "data.path=null")


# What a reader of YAML can be given


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000, "9" * 400, "-" + "9" * 400, "1e999999"])
@pytest.mark.parametrize("key", ["seed", "learning_rate"])
def test_numbers_without_end_are_refused_in_file_and_command_line(recipe, digits, key):
    assert f"training.{key}" in only_problem(recipe(f"{key}: {digits}"))
    assert f"training.{key}" in only_problem(recipe(), f"training.{key}={digits}")


@pytest.mark.parametrize("tag", ["!foo {r: 4}", "!!set {r}", "!!python/object:os.system {}", "!!omap []"])
def test_tags_are_refused_on_every_kind_of_node(recipe, tag):
    assert "tag" in only_problem(recipe(text=BASE.replace("lora:\n  r: 4", f"lora: {tag}")))


def test_aliases_of_scalars_are_aliases_too(recipe):
    assert "alias" in only_problem(recipe("weight_decay: &x 0.1", "label_smoothing_factor: *x"))


def test_a_key_with_a_dot_does_not_lend_its_line_to_another(recipe):
    found = problems(recipe("learning_rate: abc", text="training.learning_rate: 1\n" + BASE))
    assert ":1: training.learning_rate is no key" in found[0] and ":11: training.learning_rate: got" in found[1]


def test_names_of_modules_may_have_dots(recipe):
    text = BASE.replace("r: 4", "rank_pattern: {model.layers.0.self_attn.q_proj: 8}")
    assert load_recipe(recipe(text=text)).lora == {"rank_pattern": {"model.layers.0.self_attn.q_proj": 8}}


def test_text_is_read_without_white_space_around_it(recipe):
    text = BASE.replace("r: 4", "target_modules: >\n    all-linear\n")
    assert load_recipe(recipe(text=text)).lora == {"target_modules": "all-linear"}


def test_messages_hold_no_secret_and_no_control_character(recipe):
    text = BASE.replace("org/tiny", "https://me:hf_abcdefghij@huggingface.co/a/b")
    message = only_problem(recipe(text=text))
    assert "hf_abc" not in message and "***@" in message
    assert "\x1b" not in only_problem(recipe('"\\e[31mred": 1'))


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ("target_modules: '[q_proj'", "target_modules"),
        ("exclude_modules: '('", "exclude_modules"),
        ("rank_pattern: {'(': 4}", "rank_pattern"),
        ("rank_pattern: {q_proj: abc}", "rank_pattern"),
        ("alpha_pattern: {q_proj: -1}", "alpha_pattern"),
        ("trainable_token_indices: {embed_tokens: abc}", "trainable_token_indices"),
        ("layers_to_transform: [0]", "layers_to_transform"),
        ("init_lora_weights: gausian", "init_lora_weights"),
        ("alora_invocation_tokens: [1]", "alora_invocation_tokens"),
        ("use_qalora: true", "use_qalora"),
        ("fan_in_fan_out: true", "fan_in_fan_out"),
    ],
)
def test_lora_keys_that_would_fail_late_or_do_nothing(recipe, lora, key):
    assert f"lora.{key}" in only_problem(recipe(text=BASE.replace("r: 4", lora)))


@pytest.mark.parametrize("start", ["orthogonal", "olora", "pissa_niter_4"])
def test_starts_drawn_from_the_base_need_it_unquantised(recipe, start):
    text = BASE.replace("r: 4", f"init_lora_weights: {start}")
    assert load_recipe(recipe(text=text)).lora == {"init_lora_weights": start}
    assert "quantised" in only_problem(recipe(text=text + "quantization: {load_in_4bit: true}\n"))


@pytest.mark.parametrize(
    "lines",
    [
        ["liger_kernel_config: {rope: true}"],
        ["optim_target_modules: all-linear"],
        ["optim_args: a=1"],
        ["torch_compile_mode: fast"],
        ["debug: tpu_metrics_debug"],
        ["metric_for_best_model: accuracy"],
        ["greater_is_better: true"],
        ["activation_checkpointing: false", "activation_checkpointing_kwargs: {preserve_rng_state: false}"],
    ],
)
def test_training_keys_that_would_fail_late_or_do_nothing(recipe, lines):
    assert f"training.{lines[-1].partition(':')[0]}" in only_problem(recipe(*lines))


def test_revisions_of_local_places_have_no_effect(recipe, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}")
    text = BASE.replace("org/tiny", f"{tmp_path}/model\n  revision: main")
    text = text.replace("org/rows", f"{tmp_path}/rows.jsonl\n  revision: main\n  split: test")
    found = problems(recipe(text=text))
    assert [message.split(": ")[1] for message in found] == ["model.revision", "data.revision", "data.split"]


# The whole


def test_five_mistakes_are_one_report_in_the_order_of_the_text(recipe):
    text = BASE.replace("org/tiny", "org/tiny\n  dtype: float8").replace("r: 4", "rr: 4")
    found = problems(recipe("learning_rate: fast", "seed: 1", "seed: 2", "hub_token: x", text=text))
    assert len(found) == 5
    lines = [int(message.split(":")[1]) for message in found]
    assert lines == sorted(lines)


def test_the_resolved_recipe_reads_back_to_the_same_recipe(recipe, tmp_path):
    text = BASE + "quantization: {load_in_4bit: true}\n"
    first = load_recipe(
        recipe(text=text), ["training.learning_rate=2e-4", "training.save_strategy=no", "data.max_length=64"]
    )
    write_resolved(first, tmp_path / "again.yaml")
    again = load_recipe(str(tmp_path / "again.yaml"))
    assert again.resolved == first.resolved
    assert (again.model, again.data, again.batch) == (first.model, first.data, first.batch)
    assert (again.arguments, again.lora, again.quantization) == (first.arguments, first.lora, first.quantization)


@pytest.mark.parametrize("validation", ["0", "0.5"])
def test_the_smallest_recipe_reads_back_too(recipe, tmp_path, validation):
    text = f"model: {{name_or_path: a/b}}\ndata: {{path: a/b, validation: {validation}}}\n"
    first = load_recipe(recipe(text=text))
    write_resolved(first, tmp_path / "again.yaml")
    again = load_recipe(str(tmp_path / "again.yaml"))
    assert again.resolved == first.resolved and again.data == first.data


def test_reading_imports_nothing_heavy_and_takes_under_a_second(recipe):
    script = textwrap.dedent("""
        import sys, time
        start = time.perf_counter()
        from tunebook.errors import Refused
        from tunebook.recipe.reading import load_recipe
        try:
            load_recipe(sys.argv[1])
        except Refused as refused:
            print(len(refused.problems))
        heavy = {"torch", "transformers", "peft", "datasets", "accelerate", "numpy"} & set(sys.modules)
        print(sorted(heavy))
    """)
    path = recipe("learning_rte: 1")
    result = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["1", "[]"]


def test_upstream_keys_are_those_of_the_installed_classes():
    assert {"learning_rate", "activation_checkpointing", "train_sampling_strategy"} <= set(training_keys())
    assert len(training_keys()) > 100
    assert {"r", "target_modules", "use_dora"} <= set(lora_keys())
    assert {"load_in_4bit", "bnb_4bit_quant_type"} <= set(quantization_keys())


@pytest.mark.slow
def test_upstream_keys_agree_with_the_classes_themselves():
    import dataclasses
    import inspect

    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, TrainingArguments

    fields = {field.name: field for field in dataclasses.fields(TrainingArguments) if field.init}
    assert set(training_keys()) == set(fields)
    for name, key in training_keys().items():
        if key.default is not None:
            assert key.default == getattr(fields[name].default, "value", fields[name].default), name
    inherited = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
    ours = set(lora_keys())
    assert ours == {field.name for field in dataclasses.fields(LoraConfig) if field.init} - inherited - {
        "inference_mode"
    }
    signature = inspect.signature(BitsAndBytesConfig.__init__).parameters
    assert set(quantization_keys()) == set(signature) - {"self", "kwargs"}
