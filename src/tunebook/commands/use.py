"""`tunebook chat`, `generate` and `eval`: using the model of a finished run, and measuring what it learned."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from tunebook.errors import EXIT_FAILED, is_out_of_memory, what_ran_out

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
commands = typer.Typer()
BaseOption = Annotated[
    str | None, typer.Option("--base", metavar="PLACE", help="Where the folder of its base is now, if elsewhere.")
]
RunArgument = Annotated[str, typer.Argument(help="The run folder, for example runs/tiny_qlora.")]


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """End without a trace where Ctrl-C asks for it, memory is full, or nobody reads the output any more."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"failed: {what_ran_out(error)}. Fewer rows at once need less", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    except BrokenPipeError:
        drop_output()
        raise typer.Exit(1) from None


def drop_output() -> None:
    """Send what is left of the output nowhere, else the interpreter's last flush fails with a trace."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@commands.command(help="Talk with the model of a finished run; /help lists what else can be typed.")
def chat(
    run: RunArgument,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The longest answer.")] = 512,
    base: BaseOption = None,
) -> None:
    """Answer the lines of standard input."""
    from tunebook.using.chat import chat as talk

    for stream in (sys.stdin, sys.stdout):
        # Whatever the locale is; a byte that is no UTF-8 is no reason for a traceback.
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(encoding="utf-8", errors="replace")
    with _ending_quietly():
        talk(run, max_new_tokens=max_new_tokens, base=base)


@commands.command(help="Answer a file of prompts with the model of a finished run.")
def generate(  # noqa: PLR0913, PLR0917 - one for each option
    run: RunArgument,
    prompts: Annotated[
        str, typer.Option("--prompts", help="Rows in any form of training data, or a .txt with a prompt on each line.")
    ],
    out: Annotated[str, typer.Option("--out", help="The .jsonl to write, a line for each prompt, in their order.")],
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts answered at once.")] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The longest answer.")] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0: the likeliest token each time, the same every time.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="With --temperature: what is drawn; 0 if left out.")
    ] = None,
    base: BaseOption = None,
) -> None:
    """Write the answers."""
    from tunebook.using.generate import Drawing, check_drawing
    from tunebook.using.generate import generate as write

    drawing = Drawing(batch_size, max_new_tokens, temperature, seed or 0)
    check_drawing(drawing, seed is not None)
    with _ending_quietly():
        write(run, prompts, out, drawing, base)


@commands.command(name="eval", help="Measure a finished run, the model before and after it, on held-out or other rows.")
def evaluate(  # noqa: PLR0913, PLR0917 - one for each option
    run: RunArgument,
    data: Annotated[str | None, typer.Option("--data", help="Other rows than those that the run held out.")] = None,
    before: Annotated[bool, typer.Option("--before/--no-before", help="Measure the base model, too.")] = True,
    out: Annotated[str | None, typer.Option("--out", help="A .json to write the figures to.")] = None,
    answer_rows: Annotated[
        int | None, typer.Option("--answer-rows", min=0, help="Rows that are answered and compared; all if left out.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The longest answer.")] = 256,
    num_processes: Annotated[
        int, typer.Option("--num-processes", min=1, help="Share the rows among N processes; the figures are the same.")
    ] = 1,
    base: BaseOption = None,
) -> None:
    """Print loss, perplexity, exact match and ROUGE-L."""
    from tunebook.using.evaluate import Evaluation, as_words, measure_as_rank, measure_here

    wanted = Evaluation(data, before, out, answer_rows, max_new_tokens, base)
    with _ending_quietly():
        if "RANK" in os.environ:
            measure_as_rank(run, wanted)
        elif num_processes > 1:
            from tunebook.launching.launch import launch_words

            words = ["-m", "tunebook.commands.cli", "eval", *as_words(run, wanted)]
            raise typer.Exit(launch_words(words, num_processes))
        else:
            measure_here(run, wanted)
