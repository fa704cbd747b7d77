"""`tunebook eval` gives every kind of run its own figures again, before and after."""

import json

import pytest

from broken_off import make_place, summary_of
from finished_runs import train_in
from tunebook.export.finished import open_finished
from tunebook.launching.world import World
from tunebook.using.chat import Talk
from tunebook.using.evaluate import Evaluation, evaluate
from tunebook.using.trained import load_trained

pytestmark = [pytest.mark.slow, pytest.mark.long]

CHATS = ("data.path=chats.jsonl", "data.template=chatml")
VARIANTS = {
    "4-bit": ("quantization.load_in_4bit=true", "quantization.bnb_4bit_quant_type=nf4"),
    "conversations": CHATS,
    "every token of conversations": (*CHATS, "data.train_on=all"),
    "packed": (*CHATS, "data.packing=true"),
    "new tokens": (*CHATS, "model.add_special_tokens=[<|look|>]"),
    "DoRA": ("lora.use_dora=true",),
    "PiSSA": ("lora.init_lora_weights=pissa",),
    "embedding and head": ("lora.modules_to_save=[embed_tokens, lm_head]",),
    "whole model": ("lora=null",),
    "whole model in bfloat16": ("lora=null", "model.dtype=bfloat16"),
    "adapter in bfloat16": ("model.dtype=bfloat16",),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = make_place(tmp_path_factory.mktemp("variants"))
    rows = [
        [
            {"role": "user", "content": f"red {number} <|look|>"},
            {"role": "assistant", "content": "blue " * (number % 4 + 1)},
            {"role": "user", "content": "and the cat"},
            {"role": "assistant", "content": f"dog <|look|> {number}"},
        ]
        for number in range(25)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_figures_of_a_run_come_back(place, monkeypatch, variant):
    run = f"runs/{variant.replace(' ', '-')}"
    life = train_in(place, *VARIANTS[variant], "training.num_train_epochs=1", "data.answer_rows=50", "--run-dir", run)
    assert life.rank_codes() == [0], life.output()[-3000:]
    summary = summary_of(place / run)
    monkeypatch.chdir(place)
    monkeypatch.setenv("TUNEBOOK_CACHE", str(place / "cache"))
    measured = evaluate(run, Evaluation(), World())
    assert measured.before.loss == pytest.approx(summary["eval_loss_before"], abs=1e-6)
    assert measured.after.loss == pytest.approx(summary["eval_loss"], abs=1e-6)
    assert measured.before.loss != measured.after.loss
    assert measured.num_answered == summary["num_exact_match_rows"] > 0
    assert measured.before.exact_match == summary["exact_match_before"]
    assert measured.after.exact_match == summary["exact_match_after"]
    checkpoint = next((place / run / "checkpoints").iterdir())
    of_checkpoint = evaluate(str(checkpoint), Evaluation(answer_rows=0), World())
    assert of_checkpoint.before.loss == pytest.approx(summary["eval_loss_before"], abs=1e-6)
    assert of_checkpoint.after.rouge_l is None
    talk = Talk(open_finished(run), load_trained(open_finished(run)), 4)
    talk.hear("red")
    talk.hear("/base")
    assert talk._asked
