"""The words of `tunebook repro`, apart from what it does, which imports more."""

from typing import Annotated

import typer

HELP = "Start someone else's run again from its folder, say first what differs here, and compare the results."


def repro(  # noqa: PLR0913, PLR0917 - one for each option
    run: Annotated[str, typer.Argument(help="The run folder; it is only read.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Where base and data are here, for example."),
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", help="The folder of the new run; runs/<name>-repro if left out.")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option("--num-processes", min=1, help="As many as that run had, if left out and they fit.")
    ] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Start it even with other data, base or values.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what differs, and start nothing.")] = False,
) -> None:
    """Start the run again and end with its exit code."""
    from tunebook.runs.repro import reproduce

    raise typer.Exit(reproduce(run, overrides or (), run_dir, num_processes, anyway, dry_run))
