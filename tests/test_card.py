"""The card says what was measured and how it was made, in metadata that the Hub takes, and nothing of this machine."""

import json
import re
from dataclasses import fields

import pytest
from huggingface_hub import ModelCard

from tunebook.card.card import CardFacts, render_card
from tunebook.card.files import write_card, write_run_cards
from tunebook.card.licence import Licence, find_licence
from tunebook.card.loss_picture import draw_losses, find_ticks, read_metrics
from tunebook.card.public_text import last_part
from tunebook.launching.world import World
from tunebook.plan.plan import build_plan, with_split
from tunebook.recipe.reading import load_recipe
from tunebook.training.summary import RunSummary

RECIPE = """
model: {name_or_path: Qwen/Qwen2.5-7B, dtype: bfloat16}
quantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4}
lora: {r: 8}
data: {path: tatsu-lab/alpaca, validation: 0.1, max_length: 512}
training: {global_batch_size: 8, per_device_train_batch_size: 2}
"""
SUMMARY = {
    "status": "completed",
    "recipe_sha256": "ab" * 32,
    "data_fingerprint": "cd" * 32,
    "hub_datasets": ["tatsu-lab/alpaca"],
    "template": "chat template of the model",
    "stop_token_id": 2,
    "model": "Qwen/Qwen2.5-7B",
    "model_revision": "d149729",
    "public_base": "Qwen/Qwen2.5-7B",
    "method": "QLoRA, 4-bit base",
    "compute_dtype": "bfloat16",
    "world_size": 4,
    "device": "cuda",
    "hardware": "NVIDIA H200",
    "num_train_rows": 90,
    "num_eval_rows": 10,
    "num_quarantined_rows": 1,
    "num_truncated_rows": 3,
    "num_dropped_rows": 0,
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "num_optimizer_steps": 36,
    "trained_tokens": 12345,
    "processed_tokens": 54321,
    "first_loss": 2.5,
    "final_loss": 1.25,
    "eval_loss_before": 2.25,
    "eval_loss": 1.125,
    "eval_token_accuracy": 0.5,
    "exact_match_before": 0.0,
    "exact_match_after": 1 / 3,
    "num_exact_match_rows": 3,
    "tokens_per_second": 1000.5,
    "training_seconds": 130.0,
    "wall_seconds": 9000.0,
    "peak_memory_bytes": 2**34,
    "adapter_sha256": "ef" * 32,
}


def facts(tmp_path, text=RECIPE, licence=None, step=None, **summary):
    path = tmp_path / "my_recipe.yaml"
    path.write_text(text)
    recipe = load_recipe(str(path), was_run=True)
    plan = with_split(build_plan(recipe, World()), 90, 10, {}).as_dict()
    return CardFacts(recipe, plan, {**SUMMARY, **summary}, licence, step)


def test_every_part_stands_on_the_card(tmp_path):
    card = render_card(facts(tmp_path, licence=Licence(("apache-2.0",))))
    for text in (
        "[Qwen/Qwen2.5-7B](https://huggingface.co/Qwen/Qwen2.5-7B), revision d149729",
        "![Training loss and held-out loss over the optimizer steps](loss.png)",
        "| held-out loss | 2.2500 | 1.1250 |",
        "| held-out prompts answered word for word | 0 of 3 | 1 of 3 |",
        "[tatsu-lab/alpaca](https://huggingface.co/datasets/tatsu-lab/alpaca), split train",
        f"`{'cd' * 32}`",
        "1 process x 2 rows x 4 micro-steps = 8 rows per optimizer step.",
        "name_or_path: Qwen/Qwen2.5-7B",
        "| hardware | NVIDIA H200, 4 processes |",
        "| training time | 2.2 min |",
        "| time in all, loading and measuring included | 2.5 h |",
        "| peak memory of a process | 16.00 GiB |",
        "python 3.11.7, torch 2.13.0",
        "3 rows lost the end of the answer",
        "published under apache-2.0",
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16)",
        "dtype=torch.bfloat16, quantization_config=quantization",
    ):
        assert text in card, text
    assert "More Information Needed" not in card and "None" not in card and "null" not in card
    assert not re.search(r"\n{3,}", card) and "{{" not in card and "{%" not in card


def test_metadata_are_what_the_hub_reads(tmp_path):
    data = ModelCard(render_card(facts(tmp_path, licence=Licence(("apache-2.0",))))).data.to_dict()
    assert data == {
        "base_model": "Qwen/Qwen2.5-7B",
        "base_model_relation": "adapter",
        "datasets": ["tatsu-lab/alpaca"],
        "library_name": "peft",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["tunebook", "qlora"],
    }


def test_what_is_not_known_is_left_out(tmp_path):
    unknown = facts(tmp_path, public_base=None, hub_datasets=[], model="/home/alice/models/mine", eval_loss=None)
    card = render_card(unknown, picture=False)
    data = ModelCard(card).data.to_dict()
    assert not {"base_model", "base_model_relation", "datasets", "license"} & data.keys()
    assert "The licence of the base is not known here" in card and "loss.png" not in card
    assert "| held-out loss | 2.2500 | not measured |" in card and "alice" not in card
    no_hub_id = ModelCard(render_card(facts(tmp_path, public_base="not a hub id", hub_datasets=["-x--"]))).data
    assert no_hub_id.base_model is None and no_hub_id.datasets is None


@pytest.mark.parametrize(
    ("fields", "written", "shown"),
    [
        (
            {"license": "other", "license_name": "qwen", "license_link": "LICENSE"},
            {"license": "other", "license_name": "qwen"},
            "published under qwen;",
        ),
        ({"license": "other", "license_link": "https://a.example/x"}, None, "under other (https://a.example/x);"),
        ({"license": ["mit", "apache-2.0"]}, None, "published under mit, apache-2.0;"),
        ({"license": "My own words"}, {"license": "other", "license_name": "My own words"}, "under My own words;"),
    ],
)
def test_the_licence_is_that_of_the_bases_own_card(tmp_path, fields, written, shown):
    base = tmp_path / "base"
    base.mkdir()
    accepted = facts(tmp_path, RECIPE.replace("Qwen/Qwen2.5-7B", str(base))).recipe
    assert find_licence(accepted, None) is None
    for text in ("no front matter", "---\n[broken\n---\n", "---\n- a list\n---\n", "---\nlicense: 3\n---\n"):
        (base / "README.md").write_text(text)
        assert find_licence(accepted, None) is None
    (base / "README.md").write_text(f"---\n{json.dumps(fields)}\n---\n# Base\n")
    card = ModelCard(render_card(facts(tmp_path, licence=find_licence(accepted, None))))
    assert shown in card.text
    assert {name: value for name, value in card.data.to_dict().items() if name.startswith("license")} == (
        written or fields
    )


def test_a_licence_file_beside_the_base_is_linked_there(tmp_path, monkeypatch):
    (tmp_path / "card.md").write_text("---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n")
    monkeypatch.setattr("tunebook.card.licence._find_card", lambda name, revision: str(tmp_path / "card.md"))
    found = find_licence(facts(tmp_path).recipe, "d149729")
    assert found == Licence(("other",), "qwen", "https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/LICENSE")


def test_the_best_step_is_named_where_its_weights_were_kept(tmp_path):
    best = RECIPE.replace("training: {", "training: {load_best_model_at_end: true, save_strategy: epoch, ")
    assert "the best step, as the held-out loss" in render_card(facts(tmp_path, best))
    assert "best step" not in render_card(facts(tmp_path)) + render_card(facts(tmp_path, best, step=4))


def test_a_hub_that_does_not_answer_only_leaves_the_licence_unknown(tmp_path, monkeypatch):
    import threading

    never = threading.Event()
    monkeypatch.setattr("tunebook.card.licence.SECONDS", 0.05)
    for find in (lambda *_: never.wait(), lambda *_: 1 / 0):
        monkeypatch.setattr("tunebook.card.licence._find_card", find)
        assert find_licence(facts(tmp_path).recipe, None) is None
    never.set()


def test_nothing_of_the_machine_and_no_token_is_shown(tmp_path):
    hostile = (
        RECIPE.replace("tatsu-lab/alpaca", "/home/alice/rows.jsonl, template: ~/secret/mine.jinja")
        .replace("Qwen/Qwen2.5-7B", "../../alice/base, base_id: hf_abcdefgh123/x")
        .replace("r: 8", "r: 8, target_modules: ['``````', q_proj]")
    )
    given = facts(tmp_path, hostile, template="/home/alice/mine.jinja", hardware="x | <b> _y_", public_base=None,
                  model="../../alice/base", hub_datasets=[])  # fmt: skip
    card = render_card(given)
    for word in ("alice", "secret", "/home", "hf_abcdefgh123", str(tmp_path), "<b>"):
        assert word not in card, word
    assert "path: rows.jsonl" in card and "template: mine.jinja" in card and "local paths by their last part" in card
    assert r"x \| &lt;b> \_y\_, 4 processes" in card
    assert "```````yaml\n" in card, "a fence that the recipe cannot close"
    assert 'AutoModelForCausalLM.from_pretrained("base", ' in card


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/a/b.jsonl", "b.jsonl"), ("~/x", "x"), ("~", "folder"), ("/", "folder"), ("../x/y", "y"), ("..", "folder"),
        ("a/../b", "b"), ("file:///a/b", "b"), (r"C:\me\x", "x"), ("data/rows.jsonl", "data/rows.jsonl"),
        ("org/name", "org/name"), (r".*\.(q|v)_proj", r".*\.(q|v)_proj"), ("a..b", "a..b"), ("", ""),
    ],
)  # fmt: skip
def test_only_paths_of_this_machine_are_cut(text, shown):
    assert last_part(text) == shown


@pytest.mark.parametrize(
    ("template", "code", "note"),
    [
        ("alpaca text", r"### Instruction:\nName three primary colours.\n\n### Response:\n'", "the Alpaca text"),
        ("nothing: plain text", 'tokenizer("Once upon a time"', "plain texts"),
        ("ChatML", "apply_chat_template(messages", "the chat template that is saved"),
    ],
)
def test_the_code_asks_in_the_way_that_was_trained(tmp_path, template, code, note):
    card = render_card(facts(tmp_path, template=template))
    assert code in card and note in card


@pytest.mark.parametrize(
    ("lora", "note"),
    [
        ("r: 8, use_dora: true", "It is a DoRA adapter"),
        ("r: 8, use_rslora: true", "lora_alpha / sqrt(r) (rsLoRA)"),
        ("r: 8, modules_to_save: [lm_head]", r"whole trained copies of lm\_head"),
        ("r: 8, init_lora_weights: pissa", "saved as a plain LoRA of twice the rank"),
    ],
)
def test_variants_are_told_to_the_reader(tmp_path, lora, note):
    plain = re.sub("quantization.*\n", "", RECIPE)
    assert note in render_card(facts(tmp_path, plain.replace("r: 8", lora)))
    assert note not in render_card(facts(tmp_path, plain))


def test_full_fine_tunes_and_merged_models_are_whole_models(tmp_path):
    full = render_card(facts(tmp_path, re.sub("(quantization|lora).*\n", "", RECIPE), method="full fine-tune"))
    merged = render_card(facts(tmp_path), verification="| merged | 1e-7 |")
    for card in (full, merged):
        data = ModelCard(card).data
        assert data.library_name == "transformers" and data.base_model_relation == "finetune"
        assert "AutoModelForCausalLM.from_pretrained(path" in card and "peft import" not in card
    assert "## Merged and verified\n\n| merged | 1e-7 |\n" in merged and "Merged and verified" not in full


def test_new_tokens_have_their_room_made_where_the_base_is_a_folder(tmp_path):
    tokens = RECIPE.replace("dtype: bfloat16", "dtype: bfloat16, add_special_tokens: ['<|tool|>']")
    assert "resize_token_embeddings" in render_card(facts(tmp_path, tokens, public_base=None))
    named = render_card(facts(tmp_path, tokens))
    assert "resize_token_embeddings" not in named and "1 new token" in named and "pipeline(" not in named


def test_a_picture_that_cannot_be_drawn_costs_only_the_picture(tmp_path, monkeypatch):
    events = [{"step": 1, "loss": 2.0}]
    assert write_card(tmp_path, facts(tmp_path), events) == ()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG") and "loss.png" in (
        tmp_path / "README.md"
    ).read_text()

    def broken(events):
        raise ImportError("no module PIL")

    monkeypatch.setattr("tunebook.card.files.draw_losses", broken)
    other = tmp_path / "other"
    [note] = write_card(other, facts(tmp_path), events)
    assert "no module PIL" in note and [path.name for path in other.iterdir()] == ["README.md"]
    assert "loss.png" not in (other / "README.md").read_text()


def test_the_picture_takes_what_a_run_leaves_in_its_metrics(tmp_path):
    nan = float("nan")
    lines = [
        {"step": 0, "eval_loss": 3.0},
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": nan},
        {"step": 9, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 10, "lo')
    events = read_metrics(tmp_path)
    assert [event["step"] for event in events] == [0, 1, 2, 9] and len(read_metrics(tmp_path, 2)) == 3
    pictures = [
        draw_losses(events),
        draw_losses(events),
        draw_losses(events[:1]),
        draw_losses([{"step": 1, "loss": 0.0}]),
    ]
    assert pictures[0] == pictures[1] and len(set(pictures)) == 3
    assert draw_losses([{"step": 2, "loss": nan}]) is None and read_metrics(tmp_path / "nowhere") == []


@pytest.mark.parametrize("span", [(0, 1), (5.99, 6.03), (3, 3), (0, 0), (1e-9, 3e-9), (-2, 1e9), (0, 1995)])
def test_ticks_are_few_and_hold_the_values(span):
    ticks = find_ticks(*span)
    gap = ticks[1] - ticks[0]
    assert 2 <= len(ticks) <= 8 and ticks[0] <= span[0] + gap * 1e-6 and ticks[-1] >= span[1] - gap * 1e-6


def test_a_card_that_cannot_be_made_does_not_cost_the_run(tmp_path, monkeypatch):
    given = facts(tmp_path)
    summary = RunSummary(**{field.name: SUMMARY.get(field.name) for field in fields(RunSummary)})
    plan = build_plan(given.recipe, World(), run_dir=str(tmp_path / "run"))
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    assert write_run_cards(given.recipe, plan, summary) == ()
    card = (tmp_path / "run" / "README.md").read_text()
    assert 'path = "adapter"' in card and 'path = "."' in (tmp_path / "run" / "adapter" / "README.md").read_text()
    monkeypatch.setattr("tunebook.card.files.render_card", lambda *_: 1 / 0)
    [note] = write_run_cards(given.recipe, plan, summary)
    assert "could not be written (ZeroDivisionError" in note and f"tunebook export {tmp_path / 'run'}" in note


@pytest.mark.parametrize(
    ("template", "as_it_is"),
    [("alpaca text", False), ("nothing: plain text", False), ("chat template of the model", True)],
)
def test_a_pipeline_is_promised_what_the_model_was_trained_on(tmp_path, template, as_it_is):
    card = render_card(facts(tmp_path, template=template), verification="verified")
    assert ("takes it as it is" in card) == as_it_is
    assert ("takes it for texts as above" in card and "was not trained" in card) != as_it_is


def test_the_folder_on_the_card_is_the_runs_own(tmp_path):
    """Not the one where the base lies now, which is what its recipe may say by then."""
    text = RECIPE.replace("Qwen/Qwen2.5-7B", str(tmp_path / "here"))
    card = render_card(facts(tmp_path, text, public_base=None, model="models/there"))
    assert 'from_pretrained("models/there"' in card
