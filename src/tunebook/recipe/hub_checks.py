"""What the Hub would not take, or nobody else could use: found while the recipe is read, without the network."""

import re

from tunebook.recipe.checking import Report, Sections
from tunebook.system.places import is_local

NAME_PART = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
BRANCH = re.compile(r"[A-Za-z0-9_][\w./-]*", re.ASCII)
LONGEST_NAME = 96
REPO_FIX = "Write owner/name, of letters, digits, `-`, `_` and `.`, at most 96 in all"
BRANCH_FIX = "Write the name of a branch, such as main or v1"


def explain_repo(name: str) -> str:
    """Return why a repository of the Hub cannot be called so; "" where it can."""
    owner, slash, rest = name.partition("/")
    if not slash or not all(NAME_PART.fullmatch(part) for part in (owner, rest)):
        return f"{name!r} is no owner/name of the Hub"
    if len(name) > LONGEST_NAME or "--" in name or ".." in name or name.endswith((".git", ".ipynb")):
        return f"the Hub takes no repository called {name!r}"
    return ""


def explain_branch(name: str) -> str:
    """Return why a branch cannot be called so; "" where it can. A commit is no branch: it cannot be pushed to."""
    parts = name.split("/")
    bad = ".." in name or any(not part or part.startswith(".") or part.endswith((".", ".lock")) for part in parts)
    if bad or not BRANCH.fullmatch(name) or name.startswith("refs/"):
        return f"{name!r} is no name of a branch"
    return "a commit cannot be pushed to" if re.fullmatch("[0-9a-f]{40}", name) else ""


def is_public_base(name_or_path: str, base_id: str | None) -> bool:
    """Whether others can find the base: it has a public name, or is loaded from the Hub."""
    return base_id is not None or not is_local(name_or_path)


def _check_repo(sections: Sections, report: Report) -> None:
    repo, revision = sections.get("hub.repo"), sections.get("hub.revision")
    if repo is not None and (reason := explain_repo(repo)):
        report("hub.repo", reason, REPO_FIX)
    if revision is not None and (reason := explain_branch(revision)):
        report("hub.revision", reason, BRANCH_FIX)


def _check_base(sections: Sections, report: Report) -> None:
    name, base_id = sections.get("model.name_or_path"), sections.get("model.base_id")
    if base_id is not None and not all(NAME_PART.fullmatch(part) for part in base_id.split("/", 1)):
        report("model.base_id", f"{base_id!r} is no name of the Hub", "Write the owner/name of the base there")
    elif name is not None and sections.has("hub") and not is_public_base(name, base_id):
        message = f"the run is to be published, and its base is from the folder {name}, where nobody else finds it"
        report("model.base_id", message, "Write the base's own owner/name here, or remove the hub section")


HUB_CHECKS = (_check_repo, _check_base)
