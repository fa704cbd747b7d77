"""A Hub of our own on loopback: speaks what huggingface_hub asks of one, checks what it gets, and fails as told."""

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "loopbackTokenThatMayWrite"
PART_BYTES = 4 * 1024


Answer = tuple[int, object, dict[str, str]]  # status, content, headers


@dataclass
class Fault:
    """What goes wrong with requests that match `METHOD path`: the first `times` of them, all where it is None."""

    what: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: object = None
    times: int | None = None
    cut_after: int | None = None  # bytes of the request's body that are read before the connection is cut
    hang: float = 0.0
    drip: float = 0.0  # seconds for which an answer comes byte by byte
    lose_answer: bool = False  # done, but the answer never comes
    struck: int = 0

    def strikes(self, request: str) -> bool:
        if not re.fullmatch(self.what, request) or (self.times is not None and self.struck >= self.times):
            return False
        self.struck += 1
        return True


@dataclass
class Repo:
    """A repository: content by path for each commit, the newest commit of each branch, and objects of LFS."""

    private: bool
    commits: dict[str, dict[str, tuple[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)

    def head(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    def files(self, revision: str) -> dict[str, bytes]:
        return {path: content for path, (_, content) in self.commits[self.head(revision)].items()}


class LoopbackHub:
    """The server and all that it knows; `problems` must stay empty: what a real Hub would not have taken."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.user = {
            "name": "me",
            "orgs": [{"name": "team", "roleInOrg": "write"}, {"name": "seen", "roleInOrg": "read"}],
        }
        self.role = "write"
        self.multipart = False
        self.xet_storage = ""
        self.lfs_suffixes = (".safetensors", ".png")
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.problems: list[str] = []

        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # connections that are cut on purpose
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, *faults: Fault) -> None:
        """Forget what was asked so far, and fail so from now on."""
        self.faults, self.requests = list(faults), []

    def count(self, what: str) -> int:
        """Return how many requests since the last `fail` match `METHOD path`."""
        return sum(bool(re.fullmatch(what, request)) for request in self.requests)


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    hub = LoopbackHub()
    try:
        yield hub
    finally:
        hub.close()


class _Lost(Exception):
    """The connection ends here."""


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        request = f"{self.command} {unquote(url.path)}"
        self.hub.requests.append(request)
        fault = next((fault for fault in self.hub.faults if fault.strikes(request)), None)
        try:
            if fault is not None and fault.cut_after is not None:
                self.rfile.read(fault.cut_after)
                raise _Lost
            body = self.read_body()
            if fault is not None and fault.hang:
                threading.Event().wait(fault.hang)
                raise _Lost
            if fault is not None and fault.drip:
                self.drip(fault.drip)
            if fault is not None and not fault.lose_answer:
                self.answer(
                    fault.status, fault.body if fault.body is not None else {"error": "made to fail"}, fault.headers
                )
                return
            status, content, headers = self.serve(url.path, parse_qs(url.query), body)
            if fault is not None:
                raise _Lost
            self.answer(status, content, headers)
        except _Lost:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def drip(self, seconds: float) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.wfile.write(b" ")
            threading.Event().wait(0.1)
        raise _Lost

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def serve(self, path: str, query: dict, body: bytes) -> Answer:  # noqa: PLR0911 - one for each kind
        """Return status, content and headers: as the Hub answers, as far as its client asks."""
        if path.startswith("/cas"):
            return 404, {}, {}
        if storage := re.fullmatch(r"/storage/([\w-]+)/([\w.-]+)/([0-9a-f]{64})(?:/(\d+))?", path):
            return self.store(*storage.groups(), query, body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}, {}
        kind = self.headers.get("Content-Type", "")
        given = json.loads(body) if body and kind.endswith(("/json", "+json")) else {}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", **self.hub.user, "auth": {"accessToken": {"role": self.hub.role}}}, {}
        if path == "/api/validate-yaml":
            ok = not given["content"].startswith("---\nbroken")
            return (200, {"errors": [], "warnings": []}, {}) if ok else (400, {"errors": [{"message": "no"}]}, {})
        if path == "/api/repos/create":
            return self.create(given)
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/([\w-]+)/(.+))?", path)
        found = found or re.fullmatch(r"/([^/]+/[^/]+?)\.git/info/lfs/objects/(batch)()", path)
        if not found or (repo := self.hub.repos.get(found[1])) is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        what, revision = found[2] or "revision", unquote(found[3] or "") or "main"
        if what == "branch":
            if revision in repo.branches:
                return 409, {"error": "Reference already exists"}, {}
            repo.branches[revision] = repo.branches["main"]
            return 201, {}, {}
        if what != "batch" and repo.head(revision) is None:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        return getattr(self, what.replace("-", "_"))(found[1], repo, revision, given, body)

    def create(self, given: dict) -> Answer:
        name = f"{given['organization'] or self.hub.user['name']}/{given['name']}"
        if name in self.hub.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, {}
        if name.partition("/")[0] not in ("me", "team"):
            return 403, {"error": "You don't have the rights to create a model there"}, {}
        self.hub.repos[name] = repo = Repo(given.get("visibility") == "private")
        self.add_commit(repo, "main", {".gitattributes": ("regular", b"*.safetensors filter=lfs\n")})
        return 200, {"url": f"{self.hub.url}/{name}", "name": name}, {}

    def add_commit(self, repo: Repo, branch: str, files: dict[str, tuple[str, bytes]]) -> str:
        earlier = repo.commits.get(repo.branches.get(branch, ""), {})
        oid = hashlib.sha1(f"{len(repo.commits)} {branch} {sorted(files)}".encode()).hexdigest()
        repo.commits[oid] = {**earlier, **files}
        repo.branches[branch] = oid
        return oid

    def revision(self, name: str, repo: Repo, revision: str, *_: object) -> Answer:
        known = {"_id": "0", "id": name, "modelId": name, "sha": repo.head(revision), "private": repo.private}
        return 200, {**known, "siblings": [{"rfilename": path} for path in repo.files(revision)], "tags": []}, {}

    def preupload(self, _: str, repo: Repo, revision: str, given: dict, *__: object) -> Answer:
        there = repo.commits[repo.head(revision)]
        told = []
        for file in given["files"]:
            mode = "lfs" if file["path"].endswith(self.hub.lfs_suffixes) else "regular"
            oid = blob_id(*there[file["path"]]) if file["path"] in there else None
            told.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": told}, {}

    def batch(self, name: str, repo: Repo, _: str, given: dict, *__: object) -> Answer:
        told = []
        for wanted in given["objects"]:
            answer = dict(wanted)
            if wanted["oid"] not in repo.objects:
                place = f"{self.hub.url}/storage/{name}/{wanted['oid']}"
                upload = {"href": f"{place}?signature=secret"}
                if self.hub.multipart:
                    numbers = range(1, -(-wanted["size"] // PART_BYTES) + 1)
                    parts = {f"{number:05d}": f"{place}/{number}?signature=secret" for number in numbers}
                    upload = {"href": f"{place}/0?signature=secret", "header": {"chunk_size": str(PART_BYTES), **parts}}
                answer["actions"] = {"upload": upload}
            told.append(answer)
        return 200, {"transfer": "multipart" if self.hub.multipart else "basic", "objects": told}, {}

    def store(self, owner: str, name: str, oid: str, part: str | None, query: dict, body: bytes) -> Answer:
        """Take an object, or a part of one; part 0 puts the others together."""
        repo = self.hub.repos[f"{owner}/{name}"]
        if self.headers.get("Authorization") or query.get("signature") != ["secret"]:
            self.hub.problems.append(f"{self.path}: the token went to the storage, or the signature did not")
        if part is not None and part != "0":
            repo.parts.setdefault(oid, {})[int(part)] = body
            return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if part == "0":
            numbers = [told["partNumber"] for told in json.loads(body)["parts"]]
            body = b"".join(repo.parts[oid][number] for number in numbers)
        if hashlib.sha256(body).hexdigest() != oid:
            self.hub.problems.append(f"{oid}: other bytes came")
            return 400, {"error": "wrong content"}, {}
        repo.objects[oid] = body
        return 200, b"", {}

    def commit(self, name: str, repo: Repo, branch: str, _: dict, body: bytes) -> Answer:
        files: dict[str, tuple[str, bytes]] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = ("regular", base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                content = repo.objects.get(value["oid"])
                if content is None or len(content) != value["size"]:
                    self.hub.problems.append(f"{value['path']}: a commit without its object")
                    return 400, {"error": "LFS pointer pointed to a file that does not exist"}, {}
                files[value["path"]] = ("lfs", content)
        there = repo.commits[repo.branches[branch]]
        if all(there.get(path) == content for path, content in files.items()):
            self.hub.problems.append("a commit that changes nothing")
        oid = self.add_commit(repo, branch, files)
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"}, {}

    def paths_info(self, _: str, repo: Repo, revision: str, __: dict, body: bytes) -> Answer:
        there, told = repo.commits[repo.head(revision)], []
        for path in parse_qs(body.decode())["paths"]:
            if path in there:
                kind, content = there[path]
                entry = {"type": "file", "path": path, "size": len(content), "oid": blob_id("regular", content)}
                if kind == "lfs":
                    entry["lfs"] = {"oid": blob_id(kind, content), "size": len(content), "pointerSize": 130}
                told.append(entry)
        return 200, told, {}

    def xet_write_token(self, *_: object) -> Answer:
        told = {"casUrl": self.hub.xet_storage, "accessToken": "short", "exp": int(time.time()) + 3600}
        headers = {
            "X-Xet-Cas-Url": told["casUrl"],
            "X-Xet-Access-Token": told["accessToken"],
            "X-Xet-Token-Expiration": str(told["exp"]),
        }
        return 200, told, headers


def blob_id(kind: str, content: bytes) -> str:
    """Return what the Hub calls a content by: its sha256 in LFS, git's own name for a blob elsewhere."""
    if kind == "lfs":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
