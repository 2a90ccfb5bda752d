"""A chat template of somebody else ends soon, in little memory, and ordinary ones render as jinja2 renders them."""

import resource

import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template

from weft.engine.data.sandbox import install, limited

CONVERSATION = [{"role": "user", "content": "Hello, who?"}, {"role": "assistant", "content": "A test."}]
DOUBLED = "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
SPACE = "{% set ns = namespace(x='x' * 1000) %}"

HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "much text in loops": "{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "much output": SPACE + "{% for a in range(99999) %}{{ ns.x * 1000 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a long text": "{{ 'x' * 5000000000 }}",
    "a long list": "{{ ([1] * 5000000000) | length }}",
    "numbers the other way": "{{ 5000000000 * 'x' }}",
    "a power": "{{ 7 ** (7 ** (7 ** 7)) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling": SPACE + DOUBLED,
    "doubling by plus": SPACE + DOUBLED.replace("~", "+"),
    "doubling by a list": SPACE + "{% set ns.x = [1] %}" + DOUBLED.replace("~", "+"),
    "doubling by format": SPACE + DOUBLED.replace("ns.x ~ ns.x", "'%s%s' % (ns.x, ns.x)"),
    "doubling by join": SPACE + DOUBLED.replace("ns.x ~ ns.x", "[ns.x, ns.x] | join"),
    "doubling by replace": SPACE + DOUBLED.replace("ns.x ~ ns.x", "ns.x.replace('x', 'xx')"),
    "doubling by a slice": SPACE + "{% set ns.l = [] %}{% set ns.x = ns.x * 30000 %}"
    "{% for i in range(99999) %}{% set ns.l = ns.l + [ns.x[1:]] %}{% endfor %}",
    "doubling by a block": SPACE + "{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "replace": SPACE + "{{ (ns.x * 10000).replace('x', ns.x) }}",
    "join": SPACE + "{{ (ns.x * 1000).join(range(99999) | list | map('string') | list) }}",
    "the same text often": SPACE + "{{ ([ns.x * 30000] * 90000) | join }}",
    "often in a generator": SPACE + "{{ ([ns.x * 30000] * 90000) | select | join }}",
    "often by a method": SPACE + "{{ ''.join([ns.x * 30000] * 90000) }}",
    "often as a list": SPACE + "{{ [ns.x * 30000] * 90000 }}",
    "often as JSON": SPACE + "{{ {'a': [ns.x * 30000] * 90000} | tojson }}",
    "often by %": SPACE + "{{ '%s' % ([ns.x * 30000] * 90000,) }}",
    "often by ~": SPACE + "{{ 'a' ~ ([ns.x * 30000] * 90000) }}",
    "lists of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "center": "{{ 'x' | center(5000000000) }}",
    "ljust": "{{ 'x'.ljust(5000000000) }}",
    "zfill": "{{ '1'.zfill(5000000000) }}",
    "indent": "{{ 'x\n' | indent(5000000000, true) }}",
    "tojson": "{{ {'a': 1} | tojson(indent=5000000000) }}",
    "a width in %": "{{ '%5000000000s' % 'x' }}",
    "a width in format": "{{ '{:5000000000}'.format('x') }}",
    "a nested width": "{{ '{:{w}}'.format('x', w=5000000000) }}",
    "a width in a filter": "{{ '%5000000000s' | format('x') }}",
    "map": "{{ ['x'] | map('center', 5000000000) | list }}",
    "searching": SPACE + "{% set s = ns.x * 30000 %}{% for i in range(99999) %}{{ 'yy' in s }}{% endfor %}",
    "counting": SPACE + "{% set s = ns.x * 30000 %}{% for i in range(99999) %}{{ s.count('yy') }}{% endfor %}",
    "counting in lists": "{% set s = [1] * 90000 %}{% for i in range(90000) %}{{ s.count(2) }}{% endfor %}",
    "comparing lists of lists": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "hashing tuples of tuples": "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x in {1: 1} }}",
    "sorting copies": SPACE + "{{ ([ns.x * 60] * 60000) | sort | length }}",
    "dictionaries that grow": "{% set ns = namespace(d={}) %}{% for i in range(99999) %}"
    "{% set ns.d = dict(ns.d, **{'k' ~ i: 1}) %}{% endfor %}",
    "powers in a loop": "{% for i in range(90000) %}{% set x = 7 ** 30000 %}{% endfor %}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "lipsum": "{{ lipsum(n=99999, min=99999, max=100000) }}",
}
ORDINARY = {
    "loop variables": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}!{% endif %}"
    "{{ loop.previtem.role if loop.previtem }}{% endfor %}",
    "items": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
    "a filter in a loop": "{% for m in messages "
    "if m.role == 'user' %}{{ m.content | upper }}{% else %}none{% endfor %}",
    "recursion": "{% for x in [[1, [2]], 3] recursive %}{% if x is iterable %}<{{ loop(x) }}>{% else %}{{ x }}"
    "{% endif %}{% endfor %}",
    "breaks": "{% for m in messages %}{% break %}{% endfor %}ok",
    "concatenation": "{{ 'a' ~ 1 ~ none ~ messages[0].content[1:3] }}",
    "slices": "{{ messages[::-1] | map(attribute='role') | join(', ') }}{{ 'abcdef'[-2:] }}",
    "methods": "{{ messages[0].content.split(',')[0].strip().replace('H', 'J').ljust(8) }}|",
    "formats": "{{ '%5s|%-3d' % ('a', 2) }}{{ '{:>6}'.format('b') }}{{ '%s' | format('c') }}",
    "macros": "{% macro say(m) %}[{{ m.role }}: {{ caller() }}]{% endmacro %}"
    "{% for m in messages %}{% call say(m) %}{{ m.content }}{% endcall %}{% endfor %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}"
    "{% endfor %}{{ ns.n }}",
    "json": "{{ messages | tojson(indent=2) }}{{ messages[0] | tojson }}",
    "tests": "{{ 'user' in messages | map(attribute='role') | list }}{{ messages is sequence }}{{ x is defined }}"
    "{{ messages[0].role in ['user'] }}{{ 1 < 2 <= 2 }}",
    "dates": "{{ strftime_now('%Y') | length }}",
    "undefined": "{{ nothing }}{{ nothing | default('d') }}{{ messages[0].nothing }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


@pytest.fixture(autouse=True)
def _installed():
    install()


def render(template):
    with limited(sum(len(message["content"]) for message in CONVERSATION)):
        return render_jinja_template([CONVERSATION], chat_template=template, add_generation_prompt=True)[0][0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_little_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((SecurityError, UndefinedError)):
        render(HOSTILE[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # 1 GiB


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_template_renders_as_without_limits(name, monkeypatch):
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    mine = render(ORDINARY[name])
    chat_template_utils._compile_jinja_template.cache_clear()
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
    theirs = render_jinja_template([CONVERSATION], chat_template=ORDINARY[name], add_generation_prompt=True)[0][0]
    chat_template_utils._compile_jinja_template.cache_clear()
    assert mine == theirs


def test_a_long_conversation_may_take_more():
    conversation = [{"role": "user", "content": "a word, " * 1_000_000}]
    template = "{% for m in messages %}" + "{{ m.content.replace(',', ';') | trim }}" * 3 + "{% endfor %}"
    with limited(len(conversation[0]["content"])):
        text = render_jinja_template([conversation], chat_template=template)[0][0]
    assert len(text) == 3 * (8_000_000 - 1)


def test_outside_of_a_limit_nothing_is_counted():
    template = "{{ 'x' * (3 * 10 ** 8) | int }}"
    assert len(render_jinja_template([CONVERSATION], chat_template=template)[0][0]) == 3 * 10**8
