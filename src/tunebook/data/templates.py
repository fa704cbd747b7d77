"""The chat template that a recipe asks for, put into the tokenizer, so that it is saved with what was trained on it."""

from pathlib import Path
from typing import Any

from tunebook.errors import Problem, Refused

# ChatML as OpenAI published it: role and content of each message between two tokens of its own.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_KEY = "data.template"


def set_template(tokenizer: Any, template: str) -> None:
    """Give the tokenizer the template of `data.template`; the words auto and alpaca change nothing.

    Raises `Refused` where the file can't be read or is no template, or the tokenizer lacks ChatML's tokens.
    """
    if template in ("auto", "alpaca"):
        return
    if template == "chatml":
        lacking = [token for token in _CHATML_TOKENS if token not in tokenizer.get_added_vocab()]
        if lacking:
            message = f"the tokenizer has no token {' and no token '.join(lacking)}, and ChatML can't do without"
            fix = "Set data.template: alpaca, or give a .jinja file that ends turns with a token the tokenizer has"
            raise Refused(Problem(message, fix, key=_KEY))
        tokenizer.chat_template = CHATML
        return
    tokenizer.chat_template = _read_template(template)


def _read_template(path: str) -> str:
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(Problem("is not UTF-8 text", where=path, key=_KEY)) from error
    except OSError as error:
        raise Refused(Problem(f"can't be read: {error.strerror}", where=path, key=_KEY)) from error
    try:
        _compile_jinja_template(text)
    except jinja2.TemplateSyntaxError as error:
        where = f"{path}:{error.lineno}"
        raise Refused(Problem(f"is no chat template: {error.message}", "Mend it there", where, _KEY)) from error
    if not text.strip():
        raise Refused(Problem("is empty", "Write a chat template", where=path, key=_KEY))
    return text
