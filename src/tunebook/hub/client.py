"""The client of huggingface_hub made to end: every wait is bounded, and a failure becomes one line with what helps.

As it comes, the client waits for ever for an answer, for as long as a server asks in Retry-After, and asks again
without a pause while another creation is going on. Hooks on its requests close that.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import CRITICAL
from typing import Any, TypeVar

from tunebook.system.secret_text import hide_tokens

# From the first failure on, so long is tried again, unless something got through in between.
TRYING_SECONDS = 60.0
# So long the Hub may take for one answer; a commit of some files takes a few seconds.
ANSWER_SECONDS = 40.0
CONNECT_SECONDS = 10.0
# Nothing was answered and nothing sent for so long: it hangs where no time limit of the client reaches (a name server).
HANGING_SECONDS = TRYING_SECONDS + ANSWER_SECONDS + 5
MOST_TRIES = 6
PAUSES = (1.0, 2.0, 4.0, 8.0, 8.0)
# hf_xet sends from threads of its own, which no hook sees; by itself it would try for six minutes.
XET_LIMITS = {
    "HF_XET_CLIENT_RETRY_MAX_DURATION": "60s",
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "5",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "2s",
    "HF_XET_CLIENT_CONNECT_TIMEOUT": "10s",
}

PASSING = (408, 409, 412, 425, 429, 500, 502, 503, 504)
FULL = re.compile(r"quota|storage|limit reached|payment required|no space", re.I)
LOGIN = "Log in by `hf auth login`, or set HF_TOKEN, with a token that may write"
LATER = "Try again later"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Failure:
    """Why the Hub did not do something, what helps, and whether it may do it if asked again, after so many seconds."""

    reason: str
    fix: str
    may_pass: bool = False
    wait: float | None = None


class HubFailed(Exception):
    """The Hub did not do something, and it is not tried again."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.reason)


class Patience:
    """How long is tried: the time of failures is counted until something gets through, and has a limit."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = TRYING_SECONDS if seconds is None else seconds
        self.failing_since: float | None = None
        self.last_sign = time.monotonic()
        self.last_failure = Failure("the Hub does not answer", LATER)
        self._sent: dict[int, tuple[str, float]] = {}  # what each thread waits for: method, and since when
        self._num_conflicts = 0

    @property
    def left(self) -> float:
        """Seconds for which may still be tried."""
        return self.seconds - (0 if self.failing_since is None else time.monotonic() - self.failing_since)

    @property
    def hangs(self) -> bool:
        """Whether nothing has been answered, and no file is on its way, for longer than any limit allows."""
        uploads = any(method == "PUT" for method, _ in list(self._sent.values()))
        return not uploads and time.monotonic() - self.last_sign > HANGING_SECONDS

    def note_failure(self, failure: Failure) -> None:
        """Count from now on, and keep why. Raises HubFailed where the wait that is asked for is longer than is left."""
        self.failing_since = self.failing_since or time.monotonic()
        self.last_failure = failure
        if failure.wait is not None and failure.wait + 1 > self.left:
            asked = f"; it asks to wait {failure.wait:,.0f} seconds"
            raise HubFailed(Failure(failure.reason + asked, f"Try again after {failure.wait:,.0f} seconds"))

    def before_request(self, request: Any) -> None:
        """Bound a request that is about to be sent. Raises HubFailed where the time is over."""
        thread, now = threading.get_ident(), time.monotonic()
        if thread in self._sent:  # the client tries again by itself what was never answered
            method, since = self._sent[thread]
            self.failing_since = self.failing_since or (now if method == "PUT" else since)
        if self.left <= 0:
            raise HubFailed(self.last_failure)
        self.last_sign = time.monotonic()
        if self._num_conflicts > 1:
            time.sleep(min(1.0, self.left))  # the client itself asks again at once
        answer = min(ANSWER_SECONDS, max(self.left, 5.0))
        limits = {"connect": min(CONNECT_SECONDS, answer), "read": answer, "write": answer, "pool": answer}
        request.extensions["timeout"] = limits
        self._sent[thread] = request.method, time.monotonic()

    def after_response(self, response: Any) -> None:
        """Take in what was answered: a file that got through starts the time anew."""
        self.last_sign = time.monotonic()
        self._sent.pop(threading.get_ident(), None)
        self._num_conflicts = self._num_conflicts + 1 if response.status_code == 409 else 0
        if response.status_code in PASSING and (response.status_code != 409 or self._num_conflicts > 1):
            self.note_failure(failure_of_status(response.status_code, "", asked_wait(response.headers)))
        elif response.request.method == "PUT" and response.status_code < 400:
            self.failing_since = None

    def until_done(self, call: Callable[[], Answer], pauses: tuple[float, ...] = PAUSES) -> Answer:
        """Return what `call` does, tried again while its failure may pass. Raises HubFailed in the end."""
        for number in range(MOST_TRIES):
            try:
                answer = call()
                self.failing_since = None
                return answer
            except HubFailed:
                raise
            except Exception as error:
                failure = explain(error)
                self._sent.pop(threading.get_ident(), None)
                if _is_of_xet(error):  # which has tried by itself for as long as it may
                    raise HubFailed(failure) from None
                if not failure.may_pass or number == MOST_TRIES - 1:
                    raise HubFailed(failure) from None
                self.note_failure(failure)
                pause = pauses[min(number, len(pauses) - 1)] if failure.wait is None else failure.wait
                if pause >= self.left:
                    raise HubFailed(failure) from None
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


@contextmanager
def bounded_client(patience: Patience) -> Iterator[None]:
    """Have every request of huggingface_hub bounded inside, and its own lines and bars off the terminal.

    Its lines name addresses of storage that are signed, and so let whoever reads a log write there.
    """
    for name, value in XET_LIMITS.items():
        os.environ.setdefault(name, value)
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import logging
    from huggingface_hub.utils._http import default_client_factory
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    def build() -> Any:
        client = default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], patience.before_request],
            "response": [*hooks["response"], patience.after_response],
        }
        return client

    verbosity, bars = logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity(CRITICAL)
    disable_progress_bars()
    set_client_factory(build)
    try:
        yield
    finally:
        set_client_factory(default_client_factory)
        logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()


def asked_wait(headers: Any) -> float | None:
    """Return the seconds that a server asks to wait, in any of the forms it may do so; None where it does not."""
    from email.utils import parsedate_to_datetime

    limit = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""))
    asked = (headers.get("retry-after") or (limit[1] if limit else "")).strip()
    if not asked:
        return None
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    except ValueError:
        return None


def explain(error: BaseException) -> Failure:
    """Return what an error of the client means, from whichever layer it came; the token is never part of it."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for one in chain:
        if isinstance(one, HubFailed):
            return one.failure
        response = getattr(one, "response", None)
        if response is not None:
            said = getattr(one, "server_message", None) or ""
            return failure_of_status(response.status_code, said, asked_wait(response.headers))
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    for kind, failure in BY_KIND.items():
        if kind in kinds:
            return failure
    return _explain_text(error)


def failure_of_status(status: int, said: str, wait: float | None = None) -> Failure:
    """Return what an HTTP status means here; `said` is the server's own message."""
    told = f" ({cleaned(said)})" if said.strip() else ""
    if status in (402, 413, 507) or (status == 403 and FULL.search(said)):
        return Failure(f"the Hub has no room left for it{told}", "Make room, or a larger plan, at the Hub")
    if status == 429:
        return Failure(f"the Hub is asked too often{told}", LATER, True, wait)
    if status in BY_STATUS:
        reason, fix = BY_STATUS[status]
        return Failure(reason + told, fix, status in PASSING, wait)
    if status in PASSING:
        return Failure(f"the Hub answers with an error of its own, {status}{told}", LATER, True, wait)
    return Failure(f"the Hub does not take it, {status}{told}", "See what it says, and correct that")


BY_STATUS = {
    400: ("the Hub does not take it", "See what it says, and correct that"),
    401: ("the Hub does not accept the token, or there is none", LOGIN),
    403: ("the token may not write there", "Use a token that may write to that owner's repositories, or your own name"),
    404: ("there is no such repository, or the token may not see it", LOGIN),
    408: ("the Hub did not get the request in time", LATER),
    409: ("another change of the repository is going on", LATER),
    412: ("another change of the repository came in between", LATER),
}
OFFLINE = Failure("HF_HUB_OFFLINE is set", "Try again with HF_HUB_OFFLINE=0, where the Hub can be reached")
UNREACHED = Failure("the Hub can't be reached", "Try again where it can; HF_ENDPOINT says which Hub is meant", True)
BY_KIND = {
    "OfflineModeIsEnabled": OFFLINE,
    "LocalTokenNotFoundError": Failure("there is no token", LOGIN),
    "UnicodeEncodeError": Failure("the token holds letters that no token has", LOGIN),
    "FileNotFoundError": Failure("a file to push is gone", "Look at the adapter folder"),
    "PermissionError": Failure("a file to push cannot be read", "Look at the adapter folder"),
    "ConnectError": UNREACHED,
    "ConnectTimeout": UNREACHED,
    "TimeoutException": Failure("the Hub did not answer in time", LATER, True),
    "NetworkError": Failure("the connection broke off", LATER, True),
    "ProtocolError": Failure("the connection broke off", LATER, True),
    "JSONDecodeError": Failure("the Hub's answer makes no sense", LATER, True),
}


def _explain_text(error: BaseException) -> Failure:
    """Return the meaning of what comes as text alone: errors of LFS objects, of the card's metadata, of hf_xet."""
    said = cleaned(str(error))
    if "LFS batch API" in said and FULL.search(said):
        return Failure(f"the Hub has no room left for it ({said})", "Make room, or a larger plan, at the Hub")
    if "metadata in README" in said:
        return Failure(f"the card's metadata is not right ({said})", "Correct README.md in the adapter folder")
    if status := re.search(r"\b(401|403|404|429|5\d\d)\b", said):  # hf_xet's errors
        return failure_of_status(int(status[1]), said)
    if re.search(r"connect|timed? ?out|network|reset", said, re.I):
        return Failure(f"the storage of the Hub can't be reached ({said})", LATER, True)
    return Failure(f"it went wrong in the client ({type(error).__name__}: {said})", LATER)


def cleaned(said: str) -> str:
    """Return a message of somebody else on one line: short, without tokens and without signed addresses."""
    token = _token()
    text = said.replace(token, "***") if token else said
    text = re.sub(r"(https?://)[^/\s@]+@", r"\1", re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text))
    text = " ".join(hide_tokens(text).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def _token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


def _is_of_xet(error: BaseException) -> bool:
    """Whether hf_xet raised it: bare errors of Python, from no line of Python but huggingface_hub's call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_name == "_upload_xet_files"
