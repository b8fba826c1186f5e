"""The classes of transformers that cut the result of a matrix into parts, and that nobody has read.

``python -m scripts.cuts`` prints them for the installed version. Read the class's forward: parts that are used as
separate projections belong into hf_muon/routing/fused.py; all else into `READ`, with what the parts are.

Within a method, the result of a matrix of `self` is followed through variables and calls. It is cut by `chunk`,
`split`, `unbind`, `unflatten` and GLUs along another dim than the first, by different slices or indices, and by a
helper that returns several tensors.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import transformers

from hf_muon.routing.fused import RULES

BY_DEFAULT_FIRST = {"chunk", "split", "tensor_split", "unflatten"}
CUTTING = BY_DEFAULT_FIRST | {"split_with_sizes", "unbind", "glu"}
PRODUCTS = {"linear", "matmul", "bmm", "einsum", "baddbmm", "addmm"}
# Their results have other contents or dims than what they are called on.
UNLIKE = {"size", "update", "topk", "max", "cat", "stack", "numel", "dim"}
_LIKE = re.compile("conv|mask|pad|act|norm|rearrange")
_HELPER = re.compile("permute|transpose|split|shape|heads|ordering")
_MATRIX = re.compile(r"Linear|Conv|Dense|Proj\w*\(|MLP|BN\(|Gemm|ModuleList\(\)|Parameter\(")
_MAY_CUT = re.compile(r"\b(chunk|split|tensor_split|unbind|unflatten|glu)\(|GLU|\[.*:.*\]|^ +\w+, \w+.* = ", re.M)
_ASSIGNED = re.compile(r"^( +)self\.(\w+)\b[^=\n]* = (.*(?:\n\1 +.*)*)", re.M)

# Names of matrices, classes, and what the cut result is.
READ = [
    ("qa_outputs|classifier|lm_head", "*", "logits"),
    ("output", "GitForCausalLM", "logits"),
    ("weight", "InklingTopkRouter", "logits"),
    ("linear", "NeuCodecISTFTHead Xcodec2ISTFTHead", "a head"),
    ("mlp|conv2", "ZoeDepthConditionalLogBinomialSoftmax ZoeDepthSeedBinRegressor", "a head"),
    ("fn", "DeepseekV4HyperConnection Glm5NextTextHyperConnection HYV4HyperConnection", "scalars"),
    ("gru_rel_pos_linear", "WavLMAttention", "scalars"),
    ("seg_embed", "FunnelRelMultiheadAttention", "scalars"),
    ("conv_proj", "VitsConvFlow", "coordinates"),
    ("(post_)?flows", "VitsStochasticDurationPredictor", "coordinates"),
    ("attentions|stages", "FlaubertModel HieraEncoder XLMModel", "several results of a layer"),
    ("linear_(q|kv)_points", "EsmFoldInvariantPointAttention", "coordinates"),
    ("convtr", "VibeVoiceAcousticTokenizerCausalConvTranspose1d", "time steps"),
    ("decoder_embed", "ViTMAEDecoder", "tokens"),
    ("key", "LukeSelfAttention", "tokens"),
    ("(key|query|value)_proj", "ProphetNetNgramSelfAttention", "tokens"),
    ("query_scale", "DabDetrDecoder", "scales of positions"),
    ("conv", "UnivNetLvcResidualBlock", "what a predicted convolution mixes"),
]
# The rotary part of a head and the rest of it are one query or key.
ROTARY = re.compile("rope|rotary|_rot|_pe\\b")


class Source(NamedTuple):
    """A class: its name, the decorators before it, its text after the word `class`, and its file."""

    name: str
    decorators: str
    text: str
    path: Path


def sources(*paths: Path) -> Iterator[Source]:
    """Yield the classes of these files; of transformers' models if there are none."""
    root = Path(inspect.getfile(transformers)).parent
    of_models = [*root.glob("models/*/modeling_*.py"), *root.glob("integrations/**/*.py"), root / "modeling_layers.py"]
    for path in paths or of_models:
        for before, text in pairwise(re.split(r"(?m)^class (?=\w)", path.read_text())):
            own, _, after = text.rpartition("\n\n\n")
            own = own if re.match("[@#]|$", after) else text  # without decorators of the next class
            yield Source(re.match(r"\w+", own)[0], before.rpartition("\n\n\n")[2], own, path)


def cuts(classes: Iterable[Source]) -> dict[tuple[str, str], list[str]]:
    """Return the cuts, as text, by the names of the class and of its matrix."""
    files: dict[Path, dict[str, str]] = {}
    for source in classes:
        files.setdefault(source.path, {})[source.name] = source.text
    found: dict[tuple[str, str], list[str]] = {}
    for texts in files.values():
        for name, text in texts.items():
            if not _MAY_CUT.search(text):
                continue
            matrices, glus = _attributes("\n".join(_relatives(name, texts)))
            for method in ast.walk(ast.parse(f"class {text}").body[0]):
                if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                    for matrix, cut in _Method(matrices, glus).cuts_of(method):
                        found.setdefault((name, matrix), []).append(cut)
    return found


def _relatives(name: str, texts: dict[str, str]) -> list[str]:
    """Return the texts of a class, of its bases, and of what derives from it, in the same file."""
    bases = {own: re.findall(r"\w+", text.partition(":")[0])[1:] for own, text in texts.items()}
    names = [name]
    for own in names:
        names += [base for base in bases[own] if base in texts and base not in names]
    return [texts[own] for own in (*names, *(own for own in texts if name in bases[own]))]


def _attributes(text: str) -> tuple[set[str], set[str]]:
    """Return the attributes that hold matrices, and those that hold a GLU. Grouped convolutions mix tokens alone."""
    values: dict[str, str] = {}
    for _, attribute, value in _ASSIGNED.findall(text):
        values[attribute] = values.get(attribute, "") + value
    matrices = {own for own, value in values.items() if _MATRIX.search(value) and "groups=" not in value}
    return matrices, {own for own, value in values.items() if re.search(r"\bGLU\(", value)} - matrices


def _own(node: ast.AST | None) -> str:
    """Return X for `self.X` and `self.X[...]`; empty for everything else."""
    if isinstance(node, ast.Subscript):
        return _own(node.value)
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own else ""


def _name_of(call: ast.Call) -> str:
    """Return the name of the function or method that is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


class _Method:
    def __init__(self, matrices: set[str], glus: set[str]) -> None:
        self.matrices, self.glus = matrices, glus
        self.variables: dict[str, str] = {}  # the matrix whose result a variable is
        self.loops: dict[str, str] = {}  # the list of matrices of which a loop's variable is one
        self.slices: dict[tuple[str, bool], set[str]] = {}
        self.found: list[tuple[str, str]] = []

    def cuts_of(self, method: ast.FunctionDef) -> list[tuple[str, str]]:
        self._read(method.body)
        several = [(matrix, text) for (matrix, _), texts in self.slices.items() for text in texts if len(texts) > 1]
        return [*self.found, *several]

    def _read(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            for expression in ast.iter_child_nodes(statement):
                if isinstance(expression, ast.expr):
                    for node in ast.walk(expression):
                        self._look(node)
            if isinstance(statement, ast.Assign):
                self._assign(statement)
            elif isinstance(statement, ast.For):
                lists = [own for node in ast.walk(statement.iter) if (own := _own(node)) in self.matrices]
                names = [node.id for node in ast.walk(statement.target) if isinstance(node, ast.Name)]
                self.loops.update(dict.fromkeys(names, lists[0]) if lists else {})
            for field in ("body", "orelse", "finalbody"):
                self._read(getattr(statement, field, []))

    def _assign(self, statement: ast.Assign) -> None:
        value, matrix = statement.value, self._matrix_of(statement.value)
        for target in statement.targets:
            names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(names) else None
            if len(names) > 1 and matrix and isinstance(value, ast.Call) and _HELPER.search(_name_of(value)):
                self.found.append((matrix, ast.unparse(statement)))
            results = [self._matrix_of(own) for own in values] if values else [matrix] * len(names)
            for name, result in zip(names, results, strict=True):
                if isinstance(name, ast.Name):
                    self.variables[name.id] = result

    def _matrix_of(self, node: ast.AST) -> str:
        """Return the matrix whose result an expression is, in whatever shape; empty for another expression."""
        if isinstance(node, ast.Name):
            return self.variables.get(node.id, "")
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in ("T", "mT")):
            return self._matrix_of(node.value)
        if isinstance(node, ast.IfExp):
            return self._matrix_of(node.body) or self._matrix_of(node.orelse)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return self._factor(node.right)
        if isinstance(node, ast.BinOp):
            return self._matrix_of(node.left) or self._matrix_of(node.right)
        return self._result_of(node) if isinstance(node, ast.Call) else ""

    def _result_of(self, call: ast.Call) -> str:
        if _own(call.func) in self.matrices:
            return _own(call.func)
        if _name_of(call) in self.loops:
            return self.loops[_name_of(call)]
        is_method = isinstance(call.func, ast.Attribute)
        if is_method and call.func.attr in PRODUCTS:
            return next((matrix for own in call.args if (matrix := self._factor(own))), "")
        if is_method and call.func.attr in UNLIKE:
            return ""
        if is_method and (matrix := self._matrix_of(call.func.value)):
            return matrix
        is_like = _LIKE.search(_name_of(call)) is not None
        read = call.args if is_like or is_method else []
        read = read or [word.value for word in call.keywords if is_like]
        return self._matrix_of(read[0]) if read else ""

    def _factor(self, node: ast.AST) -> str:
        return next((own for inner in ast.walk(node) if (own := _own(inner)) in self.matrices), "")

    def _look(self, node: ast.AST) -> None:
        """Note a cut of a matrix's result."""
        if isinstance(node, ast.Call) and (_name_of(node) in CUTTING or _own(node.func) in self.glus):
            read = [node.func.value, *node.args[:1]] if isinstance(node.func, ast.Attribute) else node.args[:1]
            matrix = next((matrix for own in read if (matrix := self._matrix_of(own))), "")
            if matrix and not _cuts_first_dim(node):
                self.found.append((matrix, ast.unparse(node)))
        elif isinstance(node, ast.Subscript) and (matrix := self._matrix_of(node.value)):
            dims = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            sliced = any(isinstance(dim, ast.Slice) and (dim.lower or dim.upper) for dim in dims[1:])
            if sliced or (len(dims) == 1 and isinstance(dims[0], ast.Constant) and isinstance(dims[0].value, int)):
                self.slices.setdefault((matrix, sliced), set()).add(ast.unparse(node.slice))


def _cuts_first_dim(call: ast.Call) -> bool:
    """Return whether a call cuts the first dim, that of the batch."""
    name, of_torch = _name_of(call), ast.unparse(call.func).startswith("torch.")
    position = 0 if name == "unflatten" else 1
    dims = [word.value for word in call.keywords if word.arg in ("dim", "axis")] or call.args[position + of_torch :]
    return name in BY_DEFAULT_FIRST and (not dims or ast.unparse(dims[0]) == "0")


def unread(
    found: Mapping[tuple[str, str], list[str]], table: Sequence[tuple[str, str, object]]
) -> dict[tuple[str, str], list[str]]:
    """Return the cuts, by class and matrix, that no entry of a table names."""

    def named(own: str, matrix: str) -> bool:
        return any((names == "*" or own in names.split()) and re.fullmatch(words, matrix) for words, names, _ in table)

    whole = {case for case, texts in found.items() if all(ROTARY.search(text) for text in texts)}
    return {case: texts for case, texts in found.items() if case not in whole and not named(*case)}


def main() -> None:
    """Print each class that nobody has read, with its matrix and the cuts."""
    for (name, matrix), texts in unread(cuts(sources()), [*RULES, *READ]).items():
        print(f"{name}.{matrix}: {'; '.join(texts)}")


if __name__ == "__main__":
    main()
