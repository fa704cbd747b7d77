"""Pushing files to the Hub: all of them in one commit or none, seen there afterwards, and harmless to repeat."""

import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any, TypeVar

from tunebook.data.cache import file_sha256
from tunebook.errors import Problem, Refused
from tunebook.hub.client import LATER, LOGIN, Failure, HubFailed, Patience, bounded_client, cleaned, explain
from tunebook.hub.files import HubFile
from tunebook.hub.traffic import Traffic
from tunebook.recipe.schema import HubSection

MAIN = "main"
MAY_WRITE = ("admin", "write", "contributor")
CHECK_SECONDS = 15.0
POLL_SECONDS = 0.5
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Published:
    """Where a run is on the Hub: its address, the commit, and whether that is a new one."""

    url: str
    commit: str
    is_new: bool


def check_token(hub: HubSection) -> str:
    """Return why the token could not be checked ("" where it was). Raises Refused where it may not write to `repo`."""
    from huggingface_hub import HfApi, get_token

    later = f"the run is published as {hub.repo} at its end all the same"
    if get_token() is None:
        fix = "Log in by `hf auth login` or set HF_TOKEN, or train with hub=null and use `tunebook push` afterwards"
        raise Refused(Problem("there is no token of the Hub on this machine", fix, key="hub.repo"))
    patience = Patience(CHECK_SECONDS)
    try:
        with bounded_client(patience):
            user = watched(lambda: patience.until_done(HfApi().whoami), patience)
    except HubFailed as error:
        if "token" in error.failure.reason:
            raise Refused(Problem(error.failure.reason, error.failure.fix, key="hub.repo")) from None
        return f"the token is not checked, since {error.failure.reason}; {later}"
    if reason := why_not_writable(user, hub.repo):
        raise Refused(Problem(reason, "Use another token, or another owner", key="hub.repo"))
    return ""


def why_not_writable(user: dict[str, Any], repo: str) -> str:
    """Return why the owner of a token cannot write to a repository, as far as the Hub tells; "" if it can."""
    owner, token = repo.partition("/")[0], (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        return "the token may only read"
    roles = {str(org.get("name")).lower(): org.get("roleInOrg", "write") for org in user.get("orgs") or ()}
    roles[str(user.get("name")).lower()] = "admin"
    if owner.lower() not in roles and token.get("role") != "fineGrained":
        return f"the token is that of {user.get('name')}, who does not belong to {owner}"
    return "" if roles.get(owner.lower(), "write") in MAY_WRITE else f"{user.get('name')} may only read in {owner}"


def push(files: list[HubFile], hub: HubSection) -> Published:
    """Create the repository where it is absent, put all files into one commit, and see that the Hub has them.

    Raises HubFailed, within two minutes after the last thing that got through.
    """
    from huggingface_hub import HfApi, get_token

    token = get_token()
    if token is None:
        raise HubFailed(Failure("there is no token of the Hub on this machine", LOGIN))
    patience = Patience()
    api = HfApi(token=token, library_name="tunebook")
    with bounded_client(patience):
        return watched(lambda: _push(api, patience, files, hub), patience)


def _push(api: Any, patience: Patience, files: list[HubFile], hub: HubSection) -> Published:
    tried = patience.until_done
    private = True if hub.private else None  # None leaves it to the owner's own settings
    tried(lambda: api.create_repo(hub.repo, private=private, exist_ok=True))
    if hub.private and tried(lambda: api.repo_info(hub.repo)).private is False:
        fix = "Make it private at the Hub, or leave private out"
        raise HubFailed(Failure(f"{hub.repo} is public, and the run is to be private; nothing was pushed", fix))
    branch = hub.revision or MAIN
    if branch != MAIN:
        tried(lambda: api.create_branch(hub.repo, branch=branch, exist_ok=True))
    before = tried(lambda: api.repo_info(hub.repo, revision=branch)).sha
    commit = tried(lambda: _commit(api, files, hub.repo, branch))
    tried(lambda: _check_there(api, files, hub.repo, commit))
    url = f"{cleaned(api.endpoint)}/{hub.repo}" + ("" if branch == MAIN else f"/tree/{branch}")
    return Published(url, commit, commit != before)


def _commit(api: Any, files: list[HubFile], repo: str, branch: str) -> str:
    """Return the commit that has all files; the Hub's own one where nothing is new. What was sent is not sent again."""
    from huggingface_hub import CommitOperationAdd

    # Made anew for each try: only so the client asks what the Hub has by now.
    operations = [CommitOperationAdd(file.name, file.content) for file in files]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Hub's remarks on metadata
        told = api.create_commit(repo, operations, commit_message="Upload a run of tunebook", revision=branch)
    return str(told.oid)


def _check_there(api: Any, files: list[HubFile], repo: str, commit: str) -> None:
    """Raise HubFailed unless the commit holds every file, byte for byte."""
    there = {one.path: one for one in api.get_paths_info(repo, [file.name for file in files], revision=commit)}
    wrong = [file.name for file in files if not _is_same(file, there.get(file.name))]
    if wrong:
        fix = "Look for a .gitignore in the repository, and try again"
        raise HubFailed(Failure(f"the Hub does not have {', '.join(wrong)} as it was sent", fix))


def _is_same(file: HubFile, there: Any) -> bool:
    if there is None or there.size != file.size:
        return False
    content = file.content if isinstance(file.content, bytes) else None
    if there.lfs is not None:
        if content is not None:
            return bool(there.lfs.sha256 == sha256(content).hexdigest())
        assert isinstance(file.content, Path)
        return bool(there.lfs.sha256 == file_sha256(file.content))
    content = file.content.read_bytes() if isinstance(file.content, Path) else file.content
    return bool(there.blob_id == sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest())


def watched(call: Callable[[], Answer], patience: Patience) -> Answer:
    """Return what `call` does in a thread of its own, which is left behind where it hangs. Raises HubFailed then.

    hf_xet sends files without telling, so for that the traffic of this process is looked at.
    """
    from huggingface_hub.utils._runtime import is_xet_available

    answers: list[Answer] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    traffic = Traffic() if is_xet_available() else None
    thread = threading.Thread(target=work, name="hub", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            if traffic is not None and traffic.moved():
                patience.last_sign = time.monotonic()
            if thread.is_alive() and patience.hangs:
                _stop_xet()
                raise HubFailed(Failure("the Hub does not answer", LATER))
    except KeyboardInterrupt:
        _stop_xet()
        raise HubFailed(Failure("it was interrupted", "What was sent by then is not sent again")) from None
    if errors:
        raise errors[0] if isinstance(errors[0], HubFailed) else HubFailed(explain(errors[0])) from None
    return answers[0]


def _stop_xet() -> None:
    if "hf_xet" in sys.modules:
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()  # type: ignore[no-untyped-call]
