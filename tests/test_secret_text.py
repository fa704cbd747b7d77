"""Secrets and paths of their owner: found in every form and hidden in what is shown; ordinary words are none."""

import json

import pytest

from tunebook.hub.client import cleaned
from tunebook.hub.files import HubFile, find_leaks
from tunebook.system.secret_text import hide_paths, hide_tokens

LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF3hJ5lM7nP9"
CAPITALS = "AB3DE5GH7JK9MN1P"
TOKENS = [
    f"hf_{LETTERS[:34]}",
    f"api_org_{LETTERS[:34]}",
    f"ghp_{LETTERS[:36]}",
    f"github_pat_{LETTERS[:22]}_{LETTERS}",
    f"glpat-{LETTERS[:20]}",
    f"xoxb-123456789012-{LETTERS[:24]}",
    f"AIza{LETTERS[:35]}",
    f"AKIA{CAPITALS}",
    f"ASIA{CAPITALS}",
    f"sk-proj-{LETTERS}",
    f"sk_live_{LETTERS[:24]}",
    f"npm_{LETTERS[:36]}",
    f"pypi-AgEIcHlwaS5vcmc{LETTERS}",
    f"nvapi-{LETTERS}",
    f"eyJhbGciOiJIUzI1NiJ9.eyJ{LETTERS}.{LETTERS}",
    f"Authorization: Bearer {LETTERS}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{LETTERS}",
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{LETTERS}",
    f"https://me:{LETTERS[:9]}@host.example/x",
    f"postgres://me:{LETTERS[:6]}@host/db",
    f"https://{LETTERS}@host.example/x",
]


def leaks(content, folder, name="notes.txt"):
    return find_leaks([HubFile(name, content if isinstance(content, bytes) else content.encode())], folder, None)


@pytest.mark.parametrize("secret", TOKENS, ids=lambda secret: secret[:12])
def test_every_kind_of_secret_is_found_hidden_and_not_shown(tmp_path, secret):
    told = f"it is {secret} there"
    for content in (told, f"x\n{secret}", json.dumps({"x": f"one\n{secret}"}), told.encode("utf-16")):
        [problem] = leaks(content, tmp_path)
        assert "a secret" in problem.message and LETTERS[:6] not in problem.render()
    for hidden in (hide_tokens(told), cleaned(told)):
        assert LETTERS[:6] not in hidden and CAPITALS not in hidden and hidden.startswith("it is ")


@pytest.mark.parametrize(
    "path",
    [
        "/home/alice/secret-project/rows.jsonl",
        "/Users/alice/x",
        "file:///srv/models/base",
        "file://localhost/srv/base",
        r"C:\Users\alice\x",
        r"C:\\Users\\alice\\x",
        "file://HERE/base",
        r"first\nHERE/base",
    ],
)
def test_a_path_that_tells_of_somebody_is_found_in_any_text(tmp_path, path):
    path = path.replace("HERE", str(tmp_path))
    for content in (f"from {path}", f'"{path}"', f"({path})", f"at:\n{path}\n"):
        [problem] = leaks(content, tmp_path)
        assert "a path of this machine" in problem.message, content


def test_ordinary_words_are_no_secrets(tmp_path):
    words = (
        "hf_hub, hf_xet, sk-learn, git@github.com:org/x, ssh://git@host/x, https://host/a@b, AKIA, task-oriented, "
        "https://<user>:<password>@host, https://{user}:{token}@host, /home/user/x, /home, Bearer of news, "
        "https://huggingface.co/org/x/home/y/z, file:// and file:///, pypi-x, xoxo-hugs, a:b@c, npm_install"
    )
    assert leaks(words, tmp_path) == []
    assert hide_tokens("pypi-x, sk-learn, npm_install and Bearer of news") == (
        "pypi-x, sk-learn, npm_install and Bearer of news"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/secret/x.jsonl:3: bad", "x.jsonl:3: bad"),
        ("cannot read '/home/alice smith/my x.json'.", "cannot read 'my x.json'."),
        ("at file:///srv/a/b, ~/x/y.txt and /srv/models/", "at b, y.txt and models"),
        (r"C:\Users\alice\y.json is bad", "y.json is bad"),
        (
            "https://a.b/c/d, s3://x/y/z, 1/2, and/or, /help, a/b/c",
            "https://a.b/c/d, s3://x/y/z, 1/2, and/or, /help, a/b/c",
        ),
    ],
)
def test_paths_in_a_text_are_cut_to_their_end(text, shown):
    assert hide_paths(text) == shown
