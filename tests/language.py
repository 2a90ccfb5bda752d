"""Count patterns of unclear prose, which may only become fewer (`make lint-language`).

It reads docstrings, comments, messages (strings in `raise`, `print`, logs and warnings), names of tests, and Markdown.
Code in backticks and code blocks do not count.

    python -m tests.language                       # compare with tests/language.json; exit code 1 if a count rose
    python -m tests.language --list words engine   # show each place, in files whose path begins with `engine`
    python -m tests.language --update              # store the counts; refuses one that rose
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_suffix(".json")
MESSAGES = re.compile(r"print|warn\w*|log|info|debug|error|exception|critical|fail")
OPENER = re.compile(r"(?:Of|What(?!-if)|Whether|That|For|As of|To|With which)\b")
SUBJECT = r"(?:it|they|he|she|we|there|nothing|nobody|none|otherwise|then)\b"
CLAUSE = r"(?:the|an?|each|every|all|what|which|that|this|these|those|its|their|no|only|one|some|whoever)\b"
VERB = r"(?:is|are|was|were|has|have|had|does|do|would|could|can|cannot|will|may|must|needs?|takes?|gets?)\b"
FOR = re.compile(rf"[,;:] for (?:{SUBJECT}|{CLAUSE}(?: [\w'-]+){{1,5}}? {VERB})(?!,)")
WORDS = re.compile(
    r"\b(?:baton|alternately|alongside|park(?:ed|ing|s)|leftovers?|cadence|patience|knock(?:s|ed|ing)?|doors?|guests?|"
    r"meetings?|reckon\w*|verdicts?|findings?|handovers?|told|nobody|forgive\w*|(?:has|have|no|leaves|enough) room)\b",
    re.IGNORECASE,
)
"""Words of Weft's former dialect; each has a word of the field (CONTRIBUTING.md, "Plain English")."""


@dataclass(frozen=True)
class Text:
    """A piece of prose.

    Attributes:
        kind: docstring, comment, message, test name or Markdown.
    """

    path: str
    line: int
    kind: str
    text: str


def counts(texts: Sequence[Text]) -> dict[str, int]:
    """Return the number of each pattern; of semicolons, how many in 100 sentences of documentation."""
    found = {name: sum(1 for _ in hits(name, texts)) for name in ("openers", "for", "words")}
    prose = " ".join(plain(text.text) for text in texts if text.kind in ("docstring", "comment", "Markdown"))
    sentences = len(re.findall(r"[.!?](?:\s|$)", prose))
    return found | {"semicolons per 100 sentences": -(-100 * prose.count(";") // sentences)}


def hits(pattern: str, texts: Sequence[Text]) -> Iterator[tuple[Text, str]]:
    """Yield each occurrence of a pattern, with the words around it."""
    for text in texts:
        if pattern == "openers":
            if text.kind == "docstring" and OPENER.match(text.text):
                yield text, text.text[:70]
        else:
            prose = plain(text.text)
            for match in (FOR if pattern == "for" else WORDS).finditer(prose):
                yield text, prose[max(0, match.start() - 40) : match.end() + 30]


def plain(text: str) -> str:
    """Return a text without code, on one line."""
    return " ".join(re.sub(r"``[^`]*``|`[^`]*`", "`", text).split())


def texts(paths: Sequence[str]) -> Iterator[Text]:
    """Yield the prose of tracked files whose path begins with one of ``paths``."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    for path in listed.stdout.splitlines():
        if path.startswith(tuple(paths)) and (ROOT / path).exists():
            yield from of_markdown(path) if path.endswith(".md") else of_python(path)


def of_markdown(path: str) -> Iterator[Text]:
    """Yield the paragraphs of a page."""
    text = re.sub(r"(?ms)^```.*?^```", lambda block: "\n" * block[0].count("\n"), (ROOT / path).read_text())
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield Text(path, number, "Markdown", re.sub(r"\]\([^)]*\)", "]", line))


def of_python(path: str) -> Iterator[Text]:
    """Yield docstrings, comments, messages and names of tests."""
    source = (ROOT / path).read_text()
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(path, line, "docstring", node.value.value.strip())
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_message(node)):
            parts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
            yield Text(path, line, "message", " ".join(part for part in parts if isinstance(part, str)))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Text(path, line, "test name", node.name.replace("_", " "))
    with (ROOT / path).open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type == tokenize.COMMENT:
                yield Text(path, token.start[0], "comment", token.string.lstrip("# "))


def _is_message(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return bool(MESSAGES.fullmatch(name))


def main(argv: Sequence[str]) -> int:
    """Compare, list or store; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.language")
    parser.add_argument("--list", choices=("openers", "for", "words"))
    parser.add_argument("--update", action="store_true")
    parser.add_argument("paths", nargs="*", default=[""])
    args = parser.parse_args(argv)
    prose = list(texts(args.paths or [""]))
    if args.list:
        for text, words in hits(args.list, prose):
            print(f"{text.path}:{text.line}: {text.kind}: {words}")
        return 0
    current = counts(prose)
    stored = json.loads(STORED.read_text()) if STORED.exists() else current
    rose = {name: (stored[name], count) for name, count in current.items() if count > stored[name]}
    for name, (before, after) in rose.items():
        print(f"{name}: {after}, more than the {before} before; see python -m tests.language --list {name.split()[0]}")
    if args.update and not rose:
        STORED.write_text(json.dumps(current, indent=2) + "\n")
    print(", ".join(f"{name} {count}" for name, count in current.items()))
    return 1 if rose else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
