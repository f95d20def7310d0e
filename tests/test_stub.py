"""The stub file against the compiled module: the same names, members and default values."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import dspine_local
from dspine_local import _native

STUB = Path(dspine_local.__file__).with_name("_native.pyi")


def _stub_members() -> dict[str, set[str]]:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    members: dict[str, set[str]] = {"": set()}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            members[""].add(node.name)
        elif isinstance(node, ast.ClassDef):
            members[node.name] = {
                item.name if isinstance(item, ast.FunctionDef) else item.target.id  # type: ignore[union-attr]
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AnnAssign)
            } - {"__init__"}
    return members


def _module_members() -> dict[str, set[str]]:
    members: dict[str, set[str]] = {"": set()}
    for name, value in vars(_native).items():
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            members[name] = {member for member in vars(value) if not member.startswith("_")}
        else:
            members[""].add(name)
    return members


def test_stub_lists_what_the_module_has() -> None:
    assert _stub_members() == _module_members()


def test_stub_has_the_modules_arguments() -> None:
    """pybind11 writes the real signature into the docstring; the stub must name the same arguments."""
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for method in (item for item in cls.body if isinstance(item, ast.FunctionDef)):
            real = getattr(getattr(_native, cls.name), method.name)
            doc = inspect.getdoc(real) or ""
            signature = doc.split("\n")[0]
            if "(" not in signature:
                continue
            wanted = [a.arg for a in (*method.args.args, *method.args.kwonlyargs) if a.arg != "self"]
            found = signature.split("(", 1)[1].rsplit(")", 1)[0]
            for name in wanted:
                assert f"{name}: " in found, f"{cls.name}.{method.name} has no argument {name}: {signature}"
