"""The forms of secrets, and of paths that name their owner: found before publishing, hidden in what is shown."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath

# What services write in front of their tokens, and how long these are at least; GitHub, GitLab and others publish them.
SECRET_FORMS: Mapping[str, str] = {
    "Hugging Face": r"(?:hf|api_org)_[A-Za-z0-9]{16,}",
    "GitHub": r"gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}",
    "GitLab": r"gl(?:pat|ptt|dt|rt|cbt|ft|soat|agent|oas|imt|ffct)-[\w-]{16,}",
    "Slack": r"xox[a-z](?:\.xox[a-z])?-[\w-]{10,}|xapp-[\w-]{16,}",
    "Google": r"AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}",
    "AWS": r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Z0-9])",
    "Azure": r"AccountKey=[A-Za-z0-9+/=]{40,}",
    "OpenAI, Anthropic": r"sk-[\w-]{32,}",
    "Stripe": r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "Groq, Replicate, Nvidia": r"gsk_[A-Za-z0-9]{30,}|r8_[A-Za-z0-9]{30,}|nvapi-[\w-]{30,}",
    "Weights & Biases": r"wandb_v\d_\w{30,}",
    "npm, PyPI, Docker": r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{50,}|dckr_pat_[\w-]{20,}",
    "SendGrid, DigitalOcean": r"SG\.[\w-]{16,}\.[\w-]{16,}|do[oprs]_v1_[a-f0-9]{40,}",
    "signed": r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}|(?:X-Amz-Signature|X-Goog-Signature)=[\w%]{16,}",
    "header": r"(?:Bearer|Basic)\s+[A-Za-z0-9+/._~-]{20,}=*",
}
# Behind a line end that JSON writes as two characters, too.
_START = r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrtbf]))"
# In an address the words before the @: a name with a password, or a long one alone. A form (`<...>`, `{...}`) is none.
_IN_ADDRESS = r"(?<=://)(?:[^/\s@:\"'<>{}$*]*:[^/\s@\"'<>{}$*]+|[^/\s@:\"'<>{}$*]{16,})@"
_KEY = r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
# Their first letters alone, told first, halve the time: 1.3 s for a vocabulary of 13 MB.
_TOKENS = "(?=[hagxAyGsrwnpdSeXB])" + _START + "(?:" + "|".join(f"(?:{form})" for form in SECRET_FORMS.values()) + ")"
SECRETS = re.compile(f"{_TOKENS}|{_IN_ADDRESS}|{_KEY}".encode())
_HIDDEN = re.compile(f"{_TOKENS}|{_KEY}(?:(?!-----END)[\\s\\S])*")
# The Hub's own are hidden even where only their beginning was pasted.
_HUB_TOKEN = re.compile(r"\b(hf|api_org)_\w{6,}")

# Folders of a person, and addresses of files: on whichever machine, they say who made something and where.
_PERSON = r"(?!(?:user|username|you|me|USER|USERNAME)\b)\w[\w.@-]*"
OWNED_PATH = re.compile(
    (
        rf"(?<![\w.:/~-])/(?:home|Users)/{_PERSON}/[\w.-]+|\b[A-Za-z]:\\{{1,2}}Users\\{{1,2}}{_PERSON}"
        r"|\bfile://(?:localhost)?/[\w.~-]+"
    ).encode()
)
# A path from the root in the middle of a text: two names at least; in quotation marks it may have blanks.
_QUOTED_PATH = re.compile(r"""(?<=["'`])(?:file://|~)?/[^"'`\n/]+/[^"'`\n]+(?=["'`])""")
_ANY_PATH = re.compile(r"(?<![\w.:/<~-])(?:file://)?~?(?:/[^\s/\"'`:;,()<>|]+){2,}/?")
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\[^\s\"'`;,()<>|]+")


def hide_tokens(text: str) -> str:
    """Return a text without tokens, keys and the passwords of addresses that users paste into names."""
    # From the start of a word only: tried at each of its letters, a long word takes the square of its length.
    text = re.sub(r"\b(\w+://)[^/\s@]+@", r"\1***@", text)
    text = _HUB_TOKEN.sub(r"\1_***", text)
    return _HIDDEN.sub(lambda found: f"{found[0][:4]}***", text)


def hide_paths(text: str) -> str:
    """Return a text with each path from a root in it cut to its last part."""
    for pattern in (_QUOTED_PATH, _ANY_PATH):
        text = pattern.sub(lambda found: _last_name(PurePosixPath(found[0]).name), text)
    return _WINDOWS_PATH.sub(lambda found: _last_name(PureWindowsPath(found[0]).name), text)


def _last_name(name: str) -> str:
    return name.strip("~") or "folder"
