"""The sources use nothing that torch 2.11 lacks, and nothing that Python 3.12 removed."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("conf", "pipeline", "comm", "engine", "inference", "recipes", "tools", "benchmarks", "tests")
NEWER_THAN_TORCH_2_11 = {
    "torch.distributed.all_gather_single",
    "torch.distributed.reduce_scatter_single",
    "torch.distributed._symmetric_memory.put_signal",
    "torch.distributed._symmetric_memory.wait_signal",
    "torch.nn.attention.activate_flash_attention_impl",
    "torch.nn.functional.linear_cross_entropy",
}
REMOVED_BY_PYTHON_3_12 = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),
    *("configparser.SafeConfigParser", "inspect.getargspec", "locale.format", "ssl.wrap_socket", "ssl.match_hostname"),
    *("importlib.find_loader", "pkgutil.ImpImporter", "pkgutil.ImpLoader", "unittest.makeSuite", "os.popen3"),
}


def names(tree: ast.AST) -> set[str]:
    """Return the full names of what a module imports and uses of its imports, with all their parents."""
    imported = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(each.asname or each.name.partition(".")[0]): each.asname and each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    found = {full or name for name, full in imported.items()}
    found |= {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in imported:
            found.add(".".join([imported[node.id] or node.id, *reversed(parts)]))
    return {".".join(name.split(".")[:length]) for name in found for length in range(1, name.count(".") + 2)}


def test_names_are_resolved_through_imports():
    source = (
        "import torch.distributed as dist\nimport os.path\nfrom torch import nn\ndist.send.x\nnn.functional.a(os.b)"
    )
    assert {"torch.distributed.send", "torch.nn.functional.a", "os.b", "os.path"} <= names(ast.parse(source))


def test_sources_stay_within_their_versions():
    refused = NEWER_THAN_TORCH_2_11 | REMOVED_BY_PYTHON_3_12
    hint = re.compile(rf"\b({'|'.join(name.rpartition('.')[2] for name in refused)})\b")
    wrong = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text()
        if hint.search(text) and (used := names(ast.parse(text)) & refused):
            wrong[str(path.relative_to(ROOT))] = sorted(used)
    assert not wrong
