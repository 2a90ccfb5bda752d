"""Limits on what a chat template computes: it comes with a tokenizer of somebody else, and is a program.

transformers renders templates in jinja2's sandbox, which keeps them from files and modules, and lets them loop and
allocate without end. Here each loop, call and text that a template makes is counted while it renders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

MOST_STEPS = 1_000_000
"""Limit of loop passes in one rendering, plus one for each character of the conversation: a second or two."""
_CALL_STEPS = 10
MOST_CHARACTERS = 1 << 26
"""Limit of characters in one rendering, plus `PER_CHARACTER` for each character of the conversation."""
PER_CHARACTER = 64
_MOST_NUMBER = 100_000
"""Largest number that a filter or a text's method accepts, such as a width."""
_MOST_BITS = 100_000
_PART_CHARACTERS = 16
"""Assumed length of a part that is not text, with its quotes and commas."""
_OF_LISTS = frozenset(
    (
        *("default", "d", "min", "max", "sum", "range", "list", "map", "select", "reject", "selectattr", "rejectattr"),
        *("first", "last", "length", "count", "sort", "unique", "groupby", "batch", "slice", "reverse", "dictsort"),
        *("items", "random", "attr"),
    )
)
"""Filters that do not convert their argument into text."""

_ORDERING = frozenset(("min", "max", "sort", "unique", "groupby", "dictsort"))
"""Filters that copy each text in lower case, and compare values."""


class _Budget(threading.local):
    """Remaining steps and characters of this thread's rendering. ``steps`` is None outside of `limited`."""

    steps: int | None = None
    characters = 0


_LEFT = _Budget()


@contextmanager
def limited(characters: int) -> Iterator[None]:
    """Context that limits a rendering's steps and output by ``characters``, the length of its input.

    Raises:
        SecurityError: jinja2's error, if the block exceeds a limit.
    """
    _LEFT.steps, _LEFT.characters = MOST_STEPS + characters, MOST_CHARACTERS + PER_CHARACTER * characters
    try:
        yield
    finally:
        _LEFT.steps = None


def _spend(steps: int, characters: int = 0) -> None:
    if _LEFT.steps is None:
        return
    _LEFT.steps -= steps
    _LEFT.characters -= characters
    if _LEFT.steps < 0:
        raise SecurityError(f"it takes more than {MOST_STEPS:,} steps")
    if _LEFT.characters < 0:
        raise SecurityError(f"it makes more than {MOST_CHARACTERS:,} characters")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _text_length(value: Any, of_part: int = 0) -> int:
    """Estimate the length of ``str(value)``. An object that a list has several times counts as often.

    The count stops when it exceeds the characters that are left.

    Args:
        of_part: count so many characters for each part, whatever its length.
    """
    most, length, parts = max(_LEFT.characters, 0), 0, [value]
    while parts and length <= most:
        part = parts.pop()
        length += of_part or (len(part) if isinstance(part, str) else _PART_CHARACTERS)
        if isinstance(part, dict):
            parts += [*part, *part.values()]
        elif isinstance(part, (list, tuple)):
            parts += part
    return length


def _made(value: Any) -> Any:
    """Count a text or list that the template made or searches, and return it."""
    _spend(1, _length(value))
    return value


def _compared(value: Any) -> Any:
    """Count the parts of a value that is compared, hashed or searched, and return it."""
    _spend(1, _length(value) if isinstance(value, str) else _text_length(value, _PART_CHARACTERS))
    return value


def _written(value: Any) -> Any:
    """Count what a template writes, and return it."""
    _spend(0, _text_length(value))
    return value


def _concatenated(values: list[Any]) -> str:
    _spend(1, _text_length(values))
    return "".join(map(str, values))


def _looped(values: Any, characters: int) -> Any:
    """Count the passes of a loop, which writes ``characters`` of the template's own text in each, and return its
    values.
    """
    sized = values if hasattr(values, "__len__") else _listed(values)
    _spend(len(sized), len(sized) * characters)
    return sized


def _listed(values: Any) -> list[Any]:
    found = []
    for value in values:
        _spend(1)
        found.append(value)
    return found


def _check_call(name: str, text: Any, arguments: list[Any]) -> None:
    """Count the output of a filter or a text's method before it runs."""
    numbers = [abs(each) for each in arguments if type(each) is int]
    if name not in _OF_LISTS and max(numbers, default=0) > _MOST_NUMBER:
        raise SecurityError(f"{name} of a number above {_MOST_NUMBER:,}")
    most = max([_text_length(each) for each in arguments if not isinstance(each, int)], default=0)
    size = _length(text) if name in _OF_LISTS and name not in _ORDERING else _text_length(text)
    if name in ("format", "format_map"):
        _check_format(str(text), arguments)
    elif name == "replace" and len(arguments) > 1:
        size += str(text).count(str(arguments[0])) * _text_length(arguments[1])
    elif name == "join":
        between = max([0, *(len(each) for each in (text, *arguments) if isinstance(each, str))])
        size += most + between * sum(len(each) for each in (text, *arguments) if isinstance(each, (list, tuple)))
    elif name in ("expandtabs", "indent", "tojson", "wordwrap", "urlize", "xmlattr", "translate"):
        size *= 1 + max([most, *numbers])
    else:
        size += sum(numbers)
    _spend(1, size)


def _check_format(text: str, arguments: list[Any]) -> None:
    """Count the characters that a format string can produce, including its widths, before it runs."""
    digits = "".join(letter if letter.isdigit() else " " for letter in text).split()
    if any(len(each) > 6 or int(each) > _MOST_NUMBER for each in digits):
        raise SecurityError(f"a width above {_MOST_NUMBER:,}")
    widest = max(map(int, digits), default=0)
    _spend(1, len(text) + (text.count("{") + text.count("%")) * (widest + _text_length(arguments)))


class _Filters(dict):
    """Filters that count their output."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _counting(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the filter, or ``default`` if it does not exist."""
        try:
            return self[name]
        except KeyError:
            return default


def _counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if name.startswith("weft_"):
        return function

    @wraps(function)  # jinja2 marks functions that get more arguments
    def counting(*given: Any, **named: Any) -> Any:
        skipped = int(hasattr(function, "jinja_pass_arg"))
        own = list(given[skipped:])
        if name == "join" and own and not isinstance(own[0], (str, list, tuple)):
            own[0] = _listed(own[0])
        _check_call(name, own[0] if own else None, [*own[1:], *named.values()])
        return _made(function(*given[:skipped], *own, **named))

    return counting


class _Limits(NodeTransformer):
    """Inserts counting filters where a template loops, concatenates, slices and compares."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, "weft_looped", nodes.Const(characters))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "weft_concatenated")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "weft_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "weft_compared")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "weft_compared")
        return node


def _filtered(value: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None, lineno=value.lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which counts a template's work within `limited`."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, finalize=_written, **options)
        ours = {"weft_looped": _looped, "weft_concatenated": _concatenated, "weft_made": _made}
        ours["weft_compared"] = _compared
        self.filters = _Filters(self.filters | ours)
        del self.globals["lipsum"]  # it writes text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Limits().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation. Raise SecurityError if the result would be too large."""
        sides = (left, right)
        if operator == "%" and isinstance(left, str):
            _check_format(left, list(right) if isinstance(right, tuple) else [right])
        elif operator == "+":
            _spend(1, _length(left) + _length(right))
        elif operator == "*" and any(map(_length, sides)):
            _spend(1, max(map(_length, sides)) * max([0, *(side for side in sides if type(side) is int)]))
        elif all(type(side) is int for side in sides):
            bits = left.bit_length() * max(1, right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise SecurityError(f"a number of more than {_MOST_BITS:,} bits")
            _spend(1 + bits // 64)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # as jinja2 has it
        """Call a function or method for a template, and count it and its result."""
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps methods that format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            if method.__name__ == "join" and args and not isinstance(args[0], (str, list, tuple)):
                args = (_listed(args[0]),)
            _check_call(method.__name__, text, [*args, *kwargs.values()])
        elif isinstance(text, (list, tuple, dict)):  # they hash or compare their arguments
            for value in (text, *args) if method.__name__ in ("count", "index") else args:
                _compared(value)
        _spend(_CALL_STEPS)
        return _made(super().call(__context, __obj, *args, **kwargs))


def install() -> None:
    """Make transformers render templates in a `LimitedEnvironment`. Repeated calls have no effect."""
    if chat_template_utils.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()
