"""Classes of transformers' text models and vision towers that cut the result of a matrix, and that nobody has read.

``python -m scripts.cuts`` prints them for the installed version. Read the class's forward: parts that are used as
separate projections belong into hf_muon/routing/fused.py; all else into `READ`, with what the parts are.

Within a method, the result of a matrix of `self` is followed through variables and calls. It is cut by `chunk`,
`split`, `unbind`, `unflatten` and `glu` along another dim than the first, by different slices, and by a helper that
returns several tensors.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import transformers

from hf_muon.routing.fused import CUTS

# Names of matrices, classes, and what the cut result is. Experts tell themselves whether they have a gate.
READ = [
    ("gate_up_proj", r"\w+Experts", "known by transformers' own attributes"),
    ("qa_outputs|classifier|output", r"\w+For\w+", "logits"),
    ("weight", "InklingTopkRouter", "logits"),
    ("fn", r"\w+HyperConnection", "scalars"),
    ("(key|query|value)_proj", "ProphetNetNgramSelfAttention", "tokens"),
    ("conv_qk_grouped", "ZayaCCAProjection", "a convolution of groups"),
    ("proj", "ClvpGatedLinearUnit", "one matrix, outside of text models"),
    ("gate_up_proj|linear_start|ext_pw_conv_1d", r"\w+Audio\w+", "one matrix, outside of text models"),
    ("linear", r"Qwen2_5_OmniAdaLayerNormZero\w*", "one matrix, outside of text models"),
    ("in_proj", "Lfm3VlVisionShortConv", "one matrix, outside of text models"),
]
_CUTTING = {"chunk", "split", "tensor_split", "split_with_sizes", "unbind", "unflatten", "glu"}
_ALWAYS = {"unbind", "unflatten", "glu"}
_PRODUCTS = {"linear", "matmul", "bmm", "einsum", "baddbmm", "addmm"}
# Their results have other contents or dims than what they are called on.
_UNLIKE = {"size", "update", "topk", "max", "cat", "stack", "numel", "dim"}
_LIKE = re.compile("conv|mask|pad|act|norm|rearrange")
_HELPER = re.compile("permute|transpose|split|shape|heads|ordering")
_MATRIX = re.compile(r"^ +self\.(\w+)\b[^=\n]* = .*(?:Linear|Conv|Dense|Proj\w*\(|MLP|Gemm|Parameter\()", re.M)
_FILE = re.compile(r"^class \w*(ForCausalLM|LMHeadModel|VisionAttention)\b", re.M)
# The rotary part of a head and the rest of it are one query or key.
_ROTARY = re.compile("rope|rotary|_rot|_pe\\b")


def classes() -> Iterator[tuple[ast.ClassDef, set[str]]]:
    """Yield the classes of text models and vision towers, with the names of the matrices in their file."""
    for path in (Path(inspect.getfile(transformers)).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text()
        if _FILE.search(text):
            matrices = set(_MATRIX.findall(text))
            yield from ((own, matrices) for own in ast.parse(text).body if isinstance(own, ast.ClassDef))


def cuts() -> dict[tuple[str, str], set[str]]:
    """Return the cuts, as text, by the names of the matrix and of the class."""
    found: dict[tuple[str, str], set[str]] = {}
    for own, matrices in classes():
        for method in own.body:
            for matrix, text in _cuts_of(method) if isinstance(method, ast.FunctionDef) else ():
                if matrix in matrices and method.name != "__init__":
                    found.setdefault((matrix, own.name), set()).add(text)
    return found


def unread(found: dict[tuple[str, str], set[str]]) -> dict[tuple[str, str], set[str]]:
    """Return the cuts that nobody has read."""
    known = {(name, own) for name, owners, _ in CUTS for own in owners}
    whole = {case for case, texts in found.items() if all(map(_ROTARY.search, texts))}

    def was_read(matrix: str, own: str) -> bool:
        return any(re.fullmatch(names, matrix) and re.fullmatch(owners, own) for names, owners, _ in READ)

    return {case: texts for case, texts in found.items() if case not in known | whole and not was_read(*case)}


def _own(node: ast.AST) -> str:
    """Return X for `self.X` and `self.X[...]`; empty for everything else."""
    while isinstance(node, ast.Subscript):
        node = node.value
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own else ""


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _matrix_of(node: ast.AST, variables: dict[str, str]) -> str:
    """Return the matrix whose result an expression is, in whatever shape; empty for another expression."""
    if isinstance(node, ast.Name):
        return variables.get(node.id, "")
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return _matrix_of(node.value, variables)
    if isinstance(node, ast.BinOp):
        return _matrix_of(node.left, variables) or _matrix_of(node.right, variables)
    if not isinstance(node, ast.Call) or _name_of(node) in _UNLIKE:
        return ""
    if _own(node.func):
        return _own(node.func)
    if _name_of(node) in _PRODUCTS:
        return next((own for arg in node.args for inner in ast.walk(arg) if (own := _own(inner))), "")
    read = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    read += node.args[:1] if _LIKE.search(_name_of(node)) else []
    return next((matrix for each in read if (matrix := _matrix_of(each, variables))), "")


def _cuts_of(method: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    variables: dict[str, str] = {}  # the matrix whose result a variable is
    slices: dict[str, set[str]] = {}
    nodes = [node for node in ast.walk(method) if isinstance(node, (ast.Assign, ast.Call, ast.Subscript))]
    for node in sorted(nodes, key=lambda node: (node.lineno, isinstance(node, ast.Assign))):
        text = ast.unparse(node)
        if isinstance(node, ast.Assign):
            yield from _assigned(node, variables)
        elif isinstance(node, ast.Call):
            if _name_of(node) in _ALWAYS or (_name_of(node) in _CUTTING and re.search(r"[1-9]\)$", text)):
                read = [node.func.value, *node.args[:1]] if isinstance(node.func, ast.Attribute) else node.args[:1]
                yield from ((matrix, text) for each in read if (matrix := _matrix_of(each, variables)))
        elif matrix := _matrix_of(node.value, variables):
            dims = node.slice.elts[1:] if isinstance(node.slice, ast.Tuple) else []
            if any(isinstance(dim, ast.Slice) and (dim.lower or dim.upper) for dim in dims):
                slices.setdefault(matrix, set()).add(ast.unparse(node.slice))
    yield from ((matrix, text) for matrix, texts in slices.items() for text in texts if len(texts) > 1)


def _assigned(node: ast.Assign, variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Note what an assignment makes of variables; yield the cut if a helper returns several tensors."""
    value, matrix = node.value, _matrix_of(node.value, variables)
    for target in node.targets:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if len(names) > 1 and isinstance(value, ast.Call) and _HELPER.search(_name_of(value)):
            read = [matrix, *(_matrix_of(arg, variables) for arg in value.args)]
            yield from ((each, ast.unparse(node)) for each in read if each)
        of_each = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(names) else None
        for i, name in enumerate(names):
            if isinstance(name, ast.Name):
                variables[name.id] = _matrix_of(of_each[i], variables) if of_each else matrix


def main() -> None:
    """Print each class that nobody has read, with its matrix and the cuts."""
    for (matrix, own), texts in unread(cuts()).items():
        print(f"{own}.{matrix}: {'; '.join(texts)}")


if __name__ == "__main__":
    main()
