"""Make `assets/tiny-qwen2/`, the base model of the quickstart and of the tests: Qwen2 architecture, 0.85 M parameters.

    python scripts/make_tiny_model.py [--out assets/tiny-qwen2] [--steps 900]

The tokenizer (byte-level BPE) and the weights come from text made here: questions in ChatML about the letters of
invented words, such as copying a word, dropping a letter, or naming the letter before another. No lesson writes a word
backwards: that is what the quickstart teaches. The committed files were made with the defaults, in about four minutes
on one core.

Seeded and single-threaded: the same bytes each time on one machine with the same versions; other machines may round
differently.
"""

import argparse
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from make_quickstart_data import build_rows, draw_word

os.environ["RAYON_NUM_THREADS"] = "1"  # the BPE trainer breaks ties in the order its threads finish

SEED = 11
LABEL_SMOOTHING = 0.1
BATCH_SIZE = 32
VOCAB_SIZE = 512
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PAD, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What is asked about one word, and the answer. The word follows ("... of the word LOMIRA.") or stands on its own line.
LESSONS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("Copy", lambda word: word),
    ("Repeat", lambda word: word),
    ("Drop the first letter of", lambda word: word[1:]),
    ("Drop the last letter of", lambda word: word[:-1]),
    ("Put dashes into", "-".join),
    ("Give the first letter of", lambda word: word[0]),
    ("Give the last letter of", lambda word: word[-1]),
    ("Give the last two letters of", lambda word: word[-2:]),
    ("Move the last letter to the front of", lambda word: word[-1] + word[:-1]),
    ("Move the first letter to the end of", lambda word: word[1:] + word[0]),
    ("Swap the first two letters of", lambda word: word[1] + word[0] + word[2:]),
    ("Give every second letter of", lambda word: word[1::2]),
    ("Skip every second letter of", lambda word: word[::2]),
    ("Swap each pair of letters of", lambda word: "".join(word[i : i + 2][::-1] for i in range(0, len(word), 2))),
    ("Swap the last two letters of", lambda word: word[:-2] + word[-1] + word[-2]),
    ("Move the second half to the front of", lambda word: word[len(word) // 2 :] + word[: len(word) // 2]),
    ("Write twice", lambda word: f"{word} {word}"),
)

# Plain text for the merges only, in small letters after a space, so that a word in capitals stays one token a letter.
PLAIN_TEXT = (
    "Below is an instruction that describes a task, with an input that gives more context. Write a response.",
    "Give a short answer to the question. Explain how it works, and why this is the best way to do that.",
    "The model reads the text and writes the next word. What comes first, what comes last, and what comes "
    "between them?",
    "List three things that people can do in the morning before they go to work, and say which one you like most.",
    "The answer is not in the list. There is more than one way to say it, but the other one is longer.",
    "When the train was late they would walk to the station over the bridge and talk about the weather.",
    "Describe a place in which you have been, and what you have seen there. Use the words that fit.",
    "Change the sentence so that it sounds more formal. Summarize the story in one line. Translate the following.",
)


def _draw_letters(draw: random.Random) -> str:
    """Return an invented word, or letters in no order; no letter twice, so that a letter has one place."""
    if draw.random() < 0.5:
        return draw_word(draw, 4, 8)
    return "".join(draw.sample(ALPHABET, draw.randint(3, 9)))


def _neighbour_lesson(draw: random.Random) -> tuple[str, str]:
    """Ask for the letter before (or after) each of some letters of a word, in no order."""
    word = "".join(draw.sample(ALPHABET, draw.randint(4, 10)))
    side, step = draw.choice((("before", -1), ("before", -1), ("after", 1)))
    places = [place for place in range(len(word)) if 0 <= place + step < len(word)]
    asked = draw.sample(places, draw.randint(1, len(places)) if draw.random() < 0.5 else 1)
    question = f"Give the letter {side} {''.join(word[place] for place in asked)} in {word}."
    return question, "".join(word[place + step] for place in asked)


def draw_lesson(draw: random.Random) -> tuple[str, str]:
    """Return one question and its answer."""
    kind = draw.random()
    if kind < 0.3:
        return _neighbour_lesson(draw)
    if kind < 0.42:
        words = " ".join(_draw_letters(draw) for _ in range(draw.randint(2, 4)))
        return f"Copy the words.{draw.choice((chr(10), chr(10) * 2))}{words}", words
    task, answer = draw.choice(LESSONS)
    word = _draw_letters(draw)
    noun = draw.choice((" the word", " this word"))
    if draw.random() < 0.5:
        return f"{task}{draw.choice((noun, ''))} {word}.", answer(word)
    return f"{task}{noun}.{draw.choice((chr(10), chr(10) * 2))}{word}", answer(word)


def _draw_merge_text(draw: random.Random) -> Iterator[str]:
    """Yield the text the merges are learned from: questions without their words in capitals, and plain sentences."""
    for _ in range(2000):
        question, _answer = draw_lesson(draw)
        yield " ".join(part for part in question.split() if not part.strip(".").isupper())
    for row in build_rows(num_rows=500):
        yield " ".join(part for part in row["instruction"].split() if not part.strip(".").isupper())
    for _ in range(200):
        yield from PLAIN_TEXT


def build_tokenizer() -> Any:
    """Return a Qwen2Tokenizer of VOCAB_SIZE tokens: 256 bytes, merges of our own text, and three special tokens."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 3, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(_draw_merge_text(random.Random(SEED)), trainer)
    learned = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token=None,
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def build_model(tokenizer: Any) -> Any:
    """Return the untrained model. Every linear layer is a multiple of 64 wide, the block size of NF4."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.03,  # 0.02, 0.09 and 0.15 learned to copy later
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _build_batch(tokenizer: Any, draw: random.Random) -> tuple[Any, Any]:
    """Return token ids and labels, both (BATCH_SIZE, longest row); only the answer and its end count."""
    import torch

    rows = []
    for _ in range(BATCH_SIZE):
        question, answer = draw_lesson(draw)
        prompt = tokenizer.encode(f"{TURN}user\n{question}{EOS}\n{TURN}assistant\n")
        rows.append((prompt, tokenizer.encode(f"{answer}{EOS}")))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((BATCH_SIZE, width), tokenizer.pad_token_id)
    labels = torch.full((BATCH_SIZE, width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def train(model: Any, tokenizer: Any, num_steps: int) -> None:
    """Teach the lessons: Muon for the matrices, with which copying took fewer steps, and AdamW for the rest."""
    import torch

    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.007, weight_decay=0.0),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    # Full rate after 50 steps, then linearly down to 2 % over the last 60 % of the steps.
    shape = lambda step: min(1.0, (step + 1) / 50, max(0.02, (1 - step / num_steps) / 0.6))  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in optimizers]
    draw = random.Random(SEED)
    for step in range(num_steps):
        ids, labels = _build_batch(tokenizer, draw)
        counted = labels[:, 1:] != -100
        logits = model.lm_head(model.model(ids).last_hidden_state[:, :-1][counted])
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][counted], label_smoothing=LABEL_SMOOTHING)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        if (step + 1) % 50 == 0:
            right = (logits.argmax(-1) == labels[:, 1:][counted]).float().mean().item()
            print(
                f"step {step + 1} of {num_steps}: loss {loss.item():.3f}, {right:.0%} of the answer tokens right",
                flush=True,
            )


def main() -> None:
    """Make the tokenizer and the model, and write both."""
    import torch

    parser = argparse.ArgumentParser(description="Make the tiny base model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "assets" / "tiny-qwen2")
    parser.add_argument("--steps", type=int, default=900, help="training steps of %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, arguments.steps)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"wrote {sum(weight.numel() for weight in model.parameters()):,} parameters to {arguments.out}")


if __name__ == "__main__":
    main()
