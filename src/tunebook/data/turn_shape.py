"""What a chat template puts around a message, learnt once where the template provably treats every message alike.

Rendering is most of the Python work in preparing data. A template that only writes contents out, as ChatML's does, puts
the same text around each of them. To know that it does no more, it is rendered once with contents that let themselves
be joined to other text and refuse every other operation: a template that strips, splits, compares or measures a
content is found out, and rendered for each row. Constructs that would turn such a content into a plain string, which
refuses nothing, are not accepted in the first place.
"""

from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes

# What a template may consist of. Left out on purpose, since a content leaves them as a plain string: macros and other
# blocks that capture output, `~`, `%` and everything rare.
_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Assign, nodes.NSRef, nodes.Name),
    *(nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Getattr, nodes.Getitem, nodes.Slice),
    *(nodes.Add, nodes.Sub, nodes.Not, nodes.And, nodes.Or, nodes.Neg, nodes.Compare, nodes.Operand, nodes.CondExpr),
    *(nodes.Test, nodes.Filter, nodes.Call, nodes.Keyword),
)
# Filters that return what they are given, or text that shows what was done to it.
_FILTERS = ("tojson", "trim", "length", "count", "default", "d", "first", "last", "list", "string")
# Quotes, blanks at both ends, a tag, a backslash and a letter beyond ASCII: what writes a content out as JSON, escaped
# or trimmed without calling one of its methods changes this text, and then it isn't found in the result.
_PROBES = tuple(f" \n\"'<b>&\\n\\u00e9\u00e9 {name} {{{{ {name} }}}}\t\n " for name in ("question", "answer"))


class TurnShape(NamedTuple):
    """The text around a question and an answer: the prompt is `before + question + between`, then `lead + answer`.

    `tail` is what the template writes after the answer.
    """

    before: str
    between: str
    lead: str
    tail: str


class ContentUsed(Exception):
    """The template did something to a content that can come out differently for another content."""


class _Content(str):
    """A text that can be joined to others and is true; anything else done to it raises `ContentUsed`."""

    __slots__ = ()

    def __add__(self, other: str) -> "_Content":
        return _Content(str.__add__(self, other))

    def __radd__(self, other: str) -> "_Content":
        return _Content(str.__add__(other, self))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True


def _refuse(self: _Content, *_: Any, **__: Any) -> Any:
    raise ContentUsed


_ALLOWED = {*_Content.__dict__, "__class__", "__new__", "__init__", "__getattribute__", "__init_subclass__"}
for _name in sorted({*dir(str), "__html__"} - _ALLOWED):
    setattr(_Content, _name, _refuse)


def find_turn_shape(tokenizer: Any, template: str) -> TurnShape | None:
    """Return the shape that `template` gives to every question and answer, or None where rows must be rendered."""
    if not _keeps_contents_apart(template):
        return None
    question, answer = (_Content(probe) for probe in _PROBES)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        prompt = _render(tokenizer, template, messages[:1], add_generation_prompt=True)
        whole = _render(tokenizer, template, messages, add_generation_prompt=False)
    except Exception:  # ContentUsed, or what the template made of it; a broken template is reported by its first row
        return None
    if not whole.startswith(prompt) or prompt.count(_PROBES[0]) != 1:
        return None
    before, between = prompt.split(_PROBES[0])
    response = whole[len(prompt) :]
    if _PROBES[0] in response or response.count(_PROBES[1]) != 1:
        return None
    lead, tail = response.split(_PROBES[1])
    return TurnShape(before, between, lead, tail)


def _keeps_contents_apart(template: str) -> bool:
    """Whether no construct of the template can turn a content into a plain string before the template is done with it.

    A content given as an argument, or looked for in another text, is not asked by Python what it allows.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(template).environment.parse(template)
    except jinja2.TemplateError:
        return False
    return all(_is_harmless(node) for node in tree.find_all(nodes.Node))


def _is_harmless(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter):
        return node.name in _FILTERS and all(isinstance(argument, nodes.Const) for argument in node.args)
    if isinstance(node, nodes.Call):
        values = [*node.args, *(keyword.value for keyword in node.kwargs)]
        return not (node.dyn_args or node.dyn_kwargs) and all(isinstance(value, nodes.Const) for value in values)
    if isinstance(node, nodes.Test):
        return not (node.args or node.kwargs)
    if isinstance(node, nodes.Compare):
        looks_inside = any(operand.op in ("in", "notin") for operand in node.ops)
        return isinstance(node.expr, nodes.Const) or not looks_inside
    return isinstance(node, _NODES)


def _render(tokenizer: Any, template: str, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    """Render as `apply_chat_template` does, without its copying of contents into plain strings."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    variables = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
    rendered = _compile_jinja_template(template).render(
        messages=messages, add_generation_prompt=add_generation_prompt, **variables
    )
    return str(rendered)
