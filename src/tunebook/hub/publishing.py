"""Publishing a finished run: checked before it trains, tried when it has ended, and harmless to repeat by hand."""

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunebook.errors import EXIT_DONE, EXIT_UNPUBLISHED, NotPublished, Problem, Refused
from tunebook.hub.client import Failure, HubFailed, explain
from tunebook.hub.files import HubFile, check_base_named, find_leaks, list_files, read_run_recipe, render_public_recipe
from tunebook.hub.push import check_token, push
from tunebook.launching.command_line import command_name
from tunebook.launching.process_group import refuse_together
from tunebook.launching.world import World
from tunebook.plan.plan import Plan
from tunebook.recipe.hub_checks import BRANCH_FIX, REPO_FIX, explain_branch, explain_repo
from tunebook.recipe.schema import HubSection, Recipe
from tunebook.runs.folder import SUMMARY, hold_finished, read_summary
from tunebook.runs.past import explain_unfinished
from tunebook.system.writing import write_whole

MakeAnew = Callable[[Path], list[HubFile]]
BEGUN = "publishing was begun and did not come to its end"


def check_publishing(recipe: Recipe, world: World) -> None:
    """Refuse on all ranks, before weights load, a run that could not be published; only rank 0 asks the Hub.

    A Hub that cannot be asked now refuses nothing: it is said.
    """
    if recipe.hub is None:
        return
    with refuse_together():
        if world.is_main:
            text = render_public_recipe(dict(recipe.resolved))
            if leaks := find_leaks([HubFile(recipe.path, text.encode())], Path(), None):
                raise Refused(leaks)
            if note := check_token(recipe.hub):
                print(f"note: {note}", file=sys.stderr, flush=True)


def publish_finished(recipe: Recipe, plan: Plan, world: World) -> None:
    """Publish on rank 0 the finished run of a recipe that says where; the others are not needed.

    Raises NotPublished, after run_summary.json says so, where the Hub does not take it: the run stays completed.
    """
    if recipe.hub is None or not world.is_main:
        return
    folder = Path(plan.run_dir)
    try:
        publish_run(folder, recipe.hub)
    except Refused as refused:
        said = [f"{problem.where}: {problem.message}".removeprefix(": ") for problem in refused.problems]
        failure = Failure("; ".join(said), refused.problems[0].fix)
        raise NotPublished(_note_failure(folder, recipe.hub, failure)) from None
    except (OSError, ValueError) as error:  # the run's own files
        raise NotPublished(_note_failure(folder, recipe.hub, explain(error))) from None


def publish_run(folder: Path, hub: HubSection, dry_run: bool = False, make_anew: MakeAnew | None = None) -> None:
    """Push what a run folder holds for others to a repository, and print where it is; or what would be pushed.

    Raises Refused, before anything is sent, where it is no finished run or would tell what is nobody's business, and
    NotPublished where the Hub does not take it.
    """
    files = check_run(folder, hub, make_anew)
    branch = "" if hub.revision is None else f", branch {hub.revision}"
    if dry_run:
        print(f"{hub.repo} ({'private' if hub.private else 'public'}{branch}) would get:")
        for file in files:
            print(f"  {file.size:>13,}  {file.name}")
        print(f"  {sum(file.size for file in files):>13,}  bytes in {len(files)} files")
        return
    with hold_finished(folder):
        _note(folder, publish_error=BEGUN)
        try:
            done = push(files, hub)
        except HubFailed as error:
            raise NotPublished(_note_failure(folder, hub, error.failure)) from None
        _note(folder, published=done.url, publish_error=None)
    what = "published" if done.is_new else "there already"
    print(f"{what}: {done.url}  (commit {done.commit[:12]}{branch})", flush=True)


def check_run(folder: Path, hub: HubSection, make_anew: MakeAnew | None = None) -> list[HubFile]:
    """Return what is pushed of a run. Raises Refused with what stands against it, found without the network.

    `make_anew` returns files that take the place of those of their names in the adapter folder.
    """
    from huggingface_hub import get_token

    problems = []
    if reason := explain_repo(hub.repo):
        problems.append(Problem(reason, REPO_FIX, where="--repo"))
    if hub.revision is not None and (reason := explain_branch(hub.revision)):
        problems.append(Problem(reason, BRANCH_FIX, where="--revision"))
    summary = read_summary(folder)
    if summary is None:
        fix = "Name a run folder, such as runs/tiny_qlora; checkpoints are never pushed"
        problems.append(Problem(f"no {SUMMARY} there", fix, str(folder)))
    elif summary.get("status") != "completed":
        problems.append(Problem(explain_unfinished(folder, summary), where=str(folder)))
    if problems:
        raise Refused(problems)
    assert summary is not None
    check_base_named(folder, read_run_recipe(folder)[1], summary.get("model_revision"))
    made = {} if make_anew is None else {file.name: file for file in make_anew(folder)}
    files = sorted(({file.name: file for file in list_files(folder)} | made).values(), key=lambda file: file.name)
    if leaks := find_leaks(files, folder, get_token()):
        raise Refused(leaks)
    return files


def publish_by_hand(  # noqa: PLR0913, PLR0917 - one for each option
    run_dir: str,
    repo: str | None,
    private: bool,
    revision: str | None,
    dry_run: bool,
    make_anew: MakeAnew | None = None,
) -> None:
    """Publish the finished run in a folder as the command line says, and its recipe where that says nothing.

    Raises Refused and NotPublished, as `publish_run` does.
    """
    folder = Path(run_dir)
    said: dict[str, Any] = {}
    if read_summary(folder) is not None:
        said = read_run_recipe(folder)[1].get("hub") or {}
    if not repo and not said.get("repo"):
        raise Refused(Problem("is missing, and the run's recipe names no repository", "Add --repo me/name", "--repo"))
    same = not repo or repo == said.get("repo")  # privacy and branch were said of that repository
    given: dict[str, Any] = {"repo": repo or said["repo"], "private": private, "revision": revision or None}
    if same:
        given["private"] = private or bool(said.get("private"))
        given["revision"] = revision or said.get("revision")
    publish_run(folder, HubSection(**given), dry_run, make_anew)


def _note_failure(folder: Path, hub: HubSection, failure: Failure) -> str:
    """Write down why it was not published, and return it with what is there and what to type."""
    _note(folder, publish_error=failure.reason)
    words = [command_name(), "push", shlex.quote(str(folder)), "--repo", hub.repo]
    words += ["--private"] * hub.private + (["--revision", hub.revision] if hub.revision else [])
    why = Problem(failure.reason, failure.fix).render()
    return (
        f"trained and saved, but not published as {hub.repo}: {why}\n"
        f"adapter: {folder / 'adapter'}\nagain:   {' '.join(words)}"
    )


def _note(folder: Path, **news: str | None) -> None:
    """Write into run_summary.json what came of publishing; the run itself stays completed."""
    summary = read_summary(folder)
    if summary is None:
        return
    summary |= news
    summary["exit_code"] = EXIT_DONE if summary.get("published") else EXIT_UNPUBLISHED
    with suppress(OSError):  # somebody else's folder can be published, too
        write_whole(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
