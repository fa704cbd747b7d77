"""The `tunebook` command: what is done with a recipe beside `finetune.py` itself."""

import sys
from typing import Annotated, get_args

import typer
from typer.exceptions import TyperException

from tunebook import __version__
from tunebook.commands import repro as repro_command
from tunebook.commands.use import BaseOption
from tunebook.commands.use import commands as use_commands
from tunebook.errors import (
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_UNPUBLISHED,
    NotPublished,
    Problem,
    Refused,
    is_out_of_memory,
    refuse_name,
    what_ran_out,
)
from tunebook.launching.command_line import read_command
from tunebook.launching.files import Kind, check_job, gpus_of_each, render_launch_file
from tunebook.launching.world import count_gpus, world_of
from tunebook.plan.planning import plan_without_data, prepare_ahead
from tunebook.recipe.reading import load_recipe, placed_in

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.add_typer(use_commands)


@app.callback(help="Fine-tuning recipes that keep their promises.")
def tunebook() -> None:
    """Hold the subcommands: with a single one typer would leave its name out."""


@app.command(help="Print the version.")
def version() -> None:
    """Print the version of tunebook."""
    print(__version__)


@app.command(
    help="Start finetune.py on N processes of this machine, with the ranks' own exit code; or print how to elsewhere.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def launch(  # noqa: PLR0913, PLR0917 - one for each option
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="The recipe; what follows it goes to finetune.py.")],
    num_processes: Annotated[
        int | None, typer.Option("--num-processes", min=1, help="How many processes, over all machines; 1 by default.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="With --as: how many machines.")] = 1,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="With --as: how many GPUs each has.")] = None,
    kind: Annotated[
        Kind | None, typer.Option("--as", help="Start nothing: print the commands, or the file of a cluster.")
    ] = None,
) -> None:
    """Run the recipe under torch's elastic agent, in this process, without its traces; or print what starts it."""
    words = [recipe, *context.args]
    command = read_command(words)
    accepted = load_recipe(command.recipe, command.overrides)
    if kind is not None:
        check_job(kind, command, words)
        gpus = gpus_of_each(nodes, gpus, num_processes) or count_gpus() or 1
        plan = plan_without_data(accepted, world_of(nodes * gpus, "cuda"), command.run_dir)
        print(render_launch_file(kind, plan, words, nodes, gpus))
        return
    if nodes > 1 or gpus is not None:
        fix = f"Add --as {' or '.join(get_args(Kind))} to print what starts them, or use --num-processes N here"
        raise Refused(Problem("--nodes and --gpus are about a launch that is printed", fix, "command line"))
    from tunebook.launching.launch import find_script
    from tunebook.launching.launch import launch as launch_script

    # What every rank would refuse is refused here already, before torch's agent is imported.
    num_processes = num_processes or 1
    plan_without_data(accepted, world_of(num_processes, "cuda" if count_gpus() else "cpu"), command.run_dir)
    raise typer.Exit(launch_script(find_script(), words, num_processes))


@app.command(help="Read, check and tokenise the data of a recipe ahead of its run, which then starts at once.")
def prepare(
    recipe: Annotated[str, typer.Argument(help="The recipe, for example recipes/tiny_qlora.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the recipe's.")
    ] = None,
) -> None:
    """Fill the cache and print what became of every row."""
    accepted = load_recipe(recipe, tuple(overrides or ()))
    with placed_in(accepted):
        prepare_ahead(accepted)


@app.command(help="Write what came out of a run, or of RUN/checkpoints/checkpoint-N, as a folder for others.")
def export(
    run: Annotated[str, typer.Argument(help="The run folder, or a checkpoint in it.")],
    out: Annotated[str | None, typer.Option("--out", help="The folder to write; exports/NAME by default.")] = None,
    base: BaseOption = None,
) -> None:
    """Export, and print the source, the notes and the folder."""
    from tunebook.export.export import show_export

    show_export(run, out, base)


@app.command(help="Publish a finished run on the Hugging Face Hub; what is there already is not sent again.")
def push(
    run: Annotated[str, typer.Argument(help="The run folder, for example runs/tiny_qlora.")],
    repo: Annotated[str | None, typer.Option("--repo", help="owner/name; the recipe's hub.repo if left out.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Seen by its owners alone.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="The branch; main if left out.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would go, and send nothing.")] = False,
) -> None:
    """Print where the run is, or what would go there."""
    from tunebook.export.push_anew import push_by_hand

    push_by_hand(run, repo, private, revision, dry_run)


@app.command(help="Merge an adapter into its unquantised base, to a model of its own that is verified.")
def merge(
    run: Annotated[str, typer.Argument(help="The run folder, or one of its checkpoints.")],
    out: Annotated[str, typer.Option("--out", help="The folder to write, new or empty.")],
    dtype: Annotated[str | None, typer.Option("--dtype", help="bfloat16, float16 or float32; else the base's.")] = None,
    base: BaseOption = None,
) -> None:
    """Write the merged model; the exit code is 1 where it differs from the adapter, and nothing is left then."""
    from tunebook.merge.merge import merge as merge_run

    raise typer.Exit(merge_run(run, out, dtype, base))


@app.command(help="Write one HTML page that shows runs side by side: curves, rows, samples, facts, recipes.")
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, for example runs/tiny_qlora.")],
    out: Annotated[str, typer.Option("--out", metavar="FILE.html", help="Where to write it.")] = "report.html",
) -> None:
    """Write the page and say where it is."""
    from tunebook.runs.report import write_report

    print(f"report: {write_report(runs, out)}")


app.command(name="repro", help=repro_command.HELP)(repro_command.repro)


@app.command(help="Run a recipe with several seeds, and write what was measured beside it, as its receipt.")
def bench(
    recipe: Annotated[str, typer.Argument(help="The recipe; each of its runs goes to the end.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the recipe's.")
    ] = None,
    num_processes: Annotated[int, typer.Option("--num-processes", min=1, help="How many processes.")] = 1,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many runs; their losses make the band.")] = 3,
) -> None:
    """End with the exit code of a run that did not complete, or 0."""
    from tunebook.commands.bench import bench as bench_recipe

    raise typer.Exit(bench_recipe(recipe, overrides or (), num_processes, seeds))


@app.command(help="Copy a recipe for another model, look at that model, and say what was found.")
def new(
    target: Annotated[str, typer.Argument(help="The recipe to write, for example recipes/mine.yaml.")],
    model: Annotated[str, typer.Option("--model", help="A Hub id, or a local folder.")],
    source: Annotated[str, typer.Option("--from", help="The recipe to copy: its name or its path.")] = "qwen7b_qlora",
) -> None:
    """Write the copy and print what was found."""
    from tunebook.commands.new_recipe import create_recipe

    create_recipe(target, source, model)


@app.command(help="Say what is installed, what of it is known to misbehave, and whether processes can form a group.")
def doctor(
    num_processes: Annotated[int, typer.Option("--num-processes", min=2, help="Processes of the group.")] = 2,
    time_limit: Annotated[float, typer.Option("--time-limit", min=1, help="Seconds that a group may take.")] = 60,
) -> None:
    """Print the report; the exit code is 1 where something found would stop a run."""
    from tunebook.commands.doctor import examine

    raise typer.Exit(examine(num_processes, time_limit))


def main() -> None:
    """Run the command and leave with its exit code; a refusal is one message and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except Refused as refused:
        print(refused, file=sys.stderr)
        code = EXIT_REFUSED
    except NotPublished as unpublished:
        print(unpublished, file=sys.stderr)
        code = EXIT_UNPUBLISHED
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"failed: {what_ran_out(error)}", file=sys.stderr)
        code = EXIT_FAILED
    except OSError as error:
        print(refuse_name(error), file=sys.stderr)
        code = EXIT_REFUSED
    except TyperException as error:
        if error.format_message():  # none where the help was the answer
            problem = Problem(error.format_message().rstrip("."), "tunebook --help", "command line")
            print(Refused(problem), file=sys.stderr)
        code = EXIT_REFUSED
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
