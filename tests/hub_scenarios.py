"""Pushes of one finished run, each against a loopback Hub that fails in another way; what came of them as JSON.

python hub_scenarios.py PLACE OUT lfs|waits|xet|clock|xet-clock: the real client in one process, since it reads its
settings when it is imported. Seconds pass twenty times as fast, but not by the clock.
"""

import io
import json
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from hub_server import TOKEN, Fault, LoopbackHub

FASTER = 20
SLEPT: list[float] = []
CREATE, COMMIT = "POST /api/repos/create", "POST /api/models/.*/commit/.*"
PREUPLOAD, BATCH, PUT = "POST /api/models/.*/preupload/.*", "POST /.*/batch", "PUT /storage/.*"
VALIDATE, PATHS, XET_TOKEN = "POST /api/validate-yaml", "POST /.*/paths-info/.*", "GET /.*/xet-write-token/.*"
AWAY = "http://127.0.0.1:9"  # nothing listens there
BUSY = {"error": "Cannot create repo: another conflicting operation is in progress"}
FULL = {"error": "Private repository storage limit reached, please upgrade your plan"}
OBJECT_FULL = {"objects": [{"oid": "0" * 64, "size": 1, "error": {"code": 413, "message": "quota exceeded"}}]}
SIGNED = {"error": f"no: https://storage.example/x?signature=secret Bearer {TOKEN}"}

LFS: dict[str, list[Fault]] = {
    "create 401": [Fault(CREATE, 401), Fault("GET /api/models/.*", 401)],
    "create 403": [Fault(CREATE, 403), Fault("GET /api/models/.*", 404, {"X-Error-Code": "RepoNotFound"})],
    "create 409, busy for ever": [Fault(CREATE, 409, body=BUSY)],
    "create 409, busy twice": [Fault(CREATE, 409, body=BUSY, times=2)],
    "create 429, wait 1": [Fault(CREATE, 429, {"Retry-After": "1"}, times=1)],
    "create 500 for ever": [Fault(CREATE, 500)],
    "create hangs": [Fault(CREATE, hang=30)],
    "create drips": [Fault(CREATE, drip=30)],
    "card 502 with a page": [Fault(VALIDATE, 502, {"Content-Type": "text/html"}, b"<html>bad gateway", times=2)],
    "preupload 429, wait 1": [Fault(PREUPLOAD, 429, {"Retry-After": "1"}, times=2)],
    "preupload 429, wait 3600": [Fault(PREUPLOAD, 429, {"Retry-After": "3600"})],
    "preupload 429, window 3600": [Fault(PREUPLOAD, 429, {"RateLimit": '"api";r=0;t=3600'})],
    "preupload 503 with a date": [Fault(PREUPLOAD, 503, {"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"})],
    "preupload 500 once": [Fault(PREUPLOAD, 500, times=1)],
    "preupload 403, full": [Fault(PREUPLOAD, 403, body=FULL)],
    "batch 500 for ever": [Fault(BATCH, 500)],
    "batch, full": [Fault(BATCH, 200, body=OBJECT_FULL)],
    "upload cut once": [Fault(PUT, cut_after=3000, times=1)],
    "upload cut for ever": [Fault(PUT, cut_after=3000)],
    "upload hangs": [Fault(PUT, hang=30)],
    "upload 403": [Fault(PUT, 403, {"Content-Type": "text/plain"}, b"expired")],
    "upload 500 twice": [Fault(PUT, 500, times=2)],
    "upload 507": [Fault(PUT, 507)],
    "commit 400": [Fault(COMMIT, 400, body=SIGNED)],
    "commit 401": [Fault(COMMIT, 401)],
    "commit 403": [Fault(COMMIT, 403)],
    "commit 402": [Fault(COMMIT, 402)],
    "commit 409 once": [Fault(COMMIT, 409, times=1)],
    "commit 409 for ever": [Fault(COMMIT, 409)],
    "commit 429, wait 1": [Fault(COMMIT, 429, {"Retry-After": "1"}, times=2)],
    "commit 500 for ever": [Fault(COMMIT, 500)],
    "commit cut once": [Fault(COMMIT, cut_after=10, times=1)],
    "commit, the answer lost": [Fault(COMMIT, lose_answer=True, times=1)],
    "commit hangs": [Fault(COMMIT, hang=30)],
    "the Hub lost a file": [Fault(PATHS, 200, body=[])],
    "the Hub shows it late": [Fault(PATHS, 503, times=2)],
}
WAITS = (
    "create 409, busy for ever",
    "create hangs",
    "create drips",
    "batch 500 for ever",
    "upload cut for ever",
    "upload hangs",
    "commit hangs",
)
XET: dict[str, list[Fault]] = {
    "create 403": LFS["create 403"],
    "preupload 500 for ever": [Fault(PREUPLOAD, 500)],
    "preupload 403, full": LFS["preupload 403, full"],
    "token 401": [Fault(XET_TOKEN, 401)],
    "token 403": [Fault(XET_TOKEN, 403)],
    "token 500": [Fault(XET_TOKEN, 500)],
    "token cut": [Fault(XET_TOKEN, cut_after=0)],
    "storage away": [],
    "storage 500": [Fault("[A-Z]+ /cas.*", 500)],
    "storage hangs": [Fault("[A-Z]+ /cas.*", hang=60)],
    "storage 403": [Fault("[A-Z]+ /cas.*", 403)],
}
XET_SMALL = (
    "commit 401",
    "commit 403",
    "commit 409 once",
    "commit 429, wait 1",
    "commit 500 for ever",
    "commit cut once",
)


class Pushing:
    """One run folder, pushed again and again."""

    def __init__(self, hub: LoopbackHub, folder: Path) -> None:
        self.hub, self.folder, self.told = hub, folder, {}

    def push(self, name: str, faults: list[Fault], **options: object) -> None:
        from tunebook.errors import NotPublished, Refused
        from tunebook.hub.publishing import publish_by_hand

        repo = str(options.pop("repo", f"me/run-{len(self.told)}"))
        self.hub.fail(*faults)
        SLEPT.clear()
        out, began, kind = io.StringIO(), time.monotonic(), "published"
        with redirect_stdout(out), redirect_stderr(out):
            try:
                given = {"private": False, "revision": None, "dry_run": False, **options}
                publish_by_hand(str(self.folder), repo, **given)
            except (NotPublished, Refused) as error:
                kind = type(error).__name__
                out.write(str(error))
        self.told[name] = {
            "repo": repo,
            "kind": kind,
            "text": out.getvalue(),
            "seconds": round(time.monotonic() - began, 2),
            "struck": sum(fault.struck for fault in faults),
            "slept": list(SLEPT),
            "num_uploads": self.hub.count(PUT),
            "num_requests": len(self.hub.requests),
            "summary": json.loads((self.folder / "run_summary.json").read_text()),
            **self.state(repo, str(options.get("revision") or "main")),
        }

    def state(self, repo: str, branch: str) -> dict[str, object]:
        """Return what the Hub has now: commits after the first, and which files of its newest are those on disk."""
        if (there := self.hub.repos.get(repo)) is None:
            return {"num_commits": None}
        files = there.files(branch)
        adapter = self.folder / "adapter"
        same = sorted(path.name for path in adapter.iterdir() if files.get(path.name) == path.read_bytes())
        recipe = files.get("recipe.yaml", b"").decode()
        return {"num_commits": len(there.commits) - 1, "same": same, "recipe": recipe, "private": there.private}


def main(place: str, out: str, kind: str) -> None:
    hub = LoopbackHub()
    os.environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    if "xet" in kind:
        os.environ["HF_HUB_DISABLE_XET"] = "0"
        if kind == "xet":
            os.environ["HF_XET_CLIENT_RETRY_BASE_DELAY"] = "200ms"
    os.chdir(place)
    if "clock" not in kind:
        run_faster()
    pushing = Pushing(hub, Path("runs/recipe"))
    pushes = {"lfs": push_through_lfs, "waits": push_and_wait, "xet": push_through_xet}
    pushes.get(kind, push_by_the_clock)(pushing)
    pushing.told["problems"] = hub.problems
    Path(out).write_text(json.dumps(pushing.told, indent=1))


def run_faster() -> None:
    from tunebook.hub import client as hub_client
    from tunebook.hub import push as hub_push

    sleep = time.sleep

    def slept(seconds: float) -> None:
        SLEPT.append(seconds)
        sleep(seconds / FASTER)

    time.sleep = slept
    for name in ("TRYING_SECONDS", "HANGING_SECONDS"):
        setattr(hub_client, name, getattr(hub_client, name) / FASTER)
    hub_client.ANSWER_SECONDS = 1.0
    hub_push.POLL_SECONDS = 0.05


def push_through_lfs(pushing: Pushing) -> None:
    from huggingface_hub import constants

    hub = pushing.hub
    pushing.push("first", [], repo="me/run")
    pushing.push("again", [], repo="me/run")
    pushing.push("private on the public one", [], repo="me/run", private=True)
    pushing.push("private", [], private=True)
    pushing.push("branch", [], repo="team/run", revision="v1/a")
    pushing.push("branch again", [], repo="team/run", revision="v1/a")
    hub.multipart = True
    pushing.push("in parts", [])
    hub.multipart = False
    for name in sorted(set(LFS) - set(WAITS)):
        pushing.push(name, LFS[name])
    pushing.push("again after a failure", [], repo=pushing.told["commit 403"]["repo"])
    os.environ["HF_TOKEN"] = TOKEN + "ü"
    pushing.push("a token of other letters", [])
    os.environ["HF_TOKEN"] = "hf_unknownTokenOfSomebody"
    pushing.push("a token that is unknown", [])
    del os.environ["HF_TOKEN"]
    pushing.push("no token", [])
    os.environ["HF_TOKEN"] = TOKEN
    constants.HF_HUB_OFFLINE = True
    pushing.push("offline", [])
    constants.HF_HUB_OFFLINE = False
    constants.ENDPOINT = AWAY
    pushing.push("nothing listens", [])
    constants.ENDPOINT = "http://no-such-host.invalid"
    pushing.push("no such host", [])


def push_and_wait(pushing: Pushing) -> None:
    for name in WAITS:
        pushing.push(name, LFS[name])


def push_through_xet(pushing: Pushing) -> None:
    for name, faults in XET.items():
        pushing.hub.xet_storage = AWAY if name == "storage away" else f"{pushing.hub.url}/cas"
        pushing.push(name, faults)
    # What goes as a file of git needs no storage, whose protocol the loopback Hub does not speak.
    pushing.hub.lfs_suffixes = (".none",)
    pushing.push("small files", [])
    for name in XET_SMALL:
        pushing.push(name, LFS[name])


def push_by_the_clock(pushing: Pushing) -> None:
    if os.environ["HF_HUB_DISABLE_XET"] == "0":
        pushing.hub.xet_storage = f"{pushing.hub.url}/cas"
        pushing.push("storage hangs", [Fault("[A-Z]+ /cas.*", hang=1000)])
        return
    for name in ("commit 500 for ever", "batch 500 for ever", "create hangs", "upload cut for ever"):
        for fault in LFS[name]:
            fault.hang *= 10
        pushing.push(name, LFS[name])


if __name__ == "__main__":
    main(*sys.argv[1:])
