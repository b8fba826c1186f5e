"""Tell the outputs of a model from its projections, by the widths that matrices read and produce.

The model is not run. Consecutive matrices of a module, each of which reads the width that the previous one produces,
form a chain: an MLP, or a single projection. The end of a chain decides:

- It ends in a row per predicted number (a label, one more for "no label", a mel bin, an action), or in too few rows for
  a hidden size (the four coordinates of a box): an output. Keys and values with few heads, and bottlenecks, also have
  few rows; their neighbouring modules show what they are.
- Later matrices read its result: a projection, whatever its name, unless it ends in a vocabulary.
- No matrix reads its result: this does not decide, because results may be reshaped or compared.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from hf_muon.routing.fused import QUERY
from hf_muon.routing.parameters import CONV_TYPES, EMBEDDING_TYPES, ModelParameter, matrices_of
from hf_muon.storage.tensors import shape_of

# These numbers follow from no theory: with them the models in tests/golden/routes go where they should. After a change,
# `make golden` shows which models move.
# A width is too small for a hidden size if it is at most MOST, and at most 1/FEW of the other width of the matrix.
MOST, FEW = 64, 16
# Maximum number of channels of an image or a waveform; a hidden size is larger.
CHANNELS = 15
# An MLP with at most this many matrices can be an output as a whole. In a longer one, only the last matrix is.
LONGEST_HEAD = 3
# A matrix that reads more than MANY times the width that it produces is a table with a column per token.
MANY = 8

_ATTENDS = re.compile(f"{QUERY.pattern}|wq|wk|wv")
# Names of layers: `layer1`, `block_2`, `encoder_layer_0`.
_LAYER = re.compile(r"[0-9]+|(.*_)?(layer|block|stage)s?_?[0-9]+", re.IGNORECASE)


class Widths(NamedTuple):
    """The widths that a matrix reads and produces, per token or pixel."""

    reads: int
    puts_out: int


@dataclass(frozen=True)
class Chain:
    """Consecutive matrices.

    Attributes:
        module: the outermost module that holds nothing else.
        steps: the components of its name, each with the module that has this attribute; none for the model itself.
        widths: the widths of each matrix, in order.
    """

    module: nn.Module
    steps: tuple[tuple[str, nn.Module], ...]
    widths: tuple[Widths, ...]

    @property
    def layered(self) -> bool:
        """Whether the chain is in a layer, which is a numbered module."""
        return _in_layer(self.steps[:-1])

    @property
    def reads(self) -> int:
        return self.widths[0].reads

    @property
    def puts_out(self) -> int:
        return self.widths[-1].puts_out

    @property
    def ends_in_few(self) -> bool:
        return _is_few(self.puts_out, self.widths[-1].reads)


class Outputs:
    """The chains of a model, and the widths that matrices read and produce.

    Args:
        model: the model.
        params: its parameters.
        vocabularies: sizes of vocabularies.
        targets: numbers of outputs per token in its config: labels, mel bins, actions.
    """

    def __init__(
        self, model: nn.Module, params: Sequence[ModelParameter], vocabularies: set[int], targets: set[int]
    ) -> None:
        self._chained: dict[int, tuple[Widths, ...]] = {}
        # Children first: the chain of a module is made of theirs.
        for module in reversed(list(model.modules())):
            self._chained[id(module)] = self._widths_of(module)
        in_layers = {
            param.owner.in_features
            for param in params
            if isinstance(param.owner, nn.Linear)
            and (any(part.isdigit() for part, _ in param.steps) or _in_layer(param.steps[:-2]))
        }
        self._vocabularies = vocabularies
        # A number of labels that is also the width of a layer says nothing about what has so many rows.
        self._targets = targets - in_layers
        # Rows of tables: vocabularies that are not in a config, and positions.
        self._tables = {param.shape[0] for param in params if isinstance(param.owner, EMBEDDING_TYPES)}
        # Widths that matrices produce or tables hold, with the first position in the model's order.
        self._put_out: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}  # width -> positions of parameters that read it
        self._positions: dict[int, int] = {}
        self._layered: set[int] = set()
        self._weights_in_layers = 0
        for position, param in enumerate(params):
            self._positions[id(param.parameter)] = position
            if isinstance(param.owner, EMBEDDING_TYPES):
                self._put_out.setdefault(param.shape[-1], position)
            elif (widths := widths_of(param.owner)) and not _is_few(widths.puts_out, widths.reads):
                self._put_out.setdefault(widths.puts_out, position)
            for width in _read(param):
                self._readers.setdefault(width, []).append(position)
            chain = self.chain_of(param)
            if _in_layer(param.steps[:-2]) if chain is None else chain.layered:
                self._layered.add(position)
                self._weights_in_layers += math.prod(param.shape) * isinstance(param.owner, nn.Linear)

    def chain_of(self, param: ModelParameter) -> Chain | None:
        """Return the longest chain with this matrix; None if it is not in a linear layer or a convolution."""
        if param.own_name != "weight" or widths_of(param.owner) is None:
            return None
        depth = len(param.steps) - 1  # number of steps that lead to the chain's module
        while depth > 0 and self._chained[id(param.steps[depth - 1][1])]:
            depth -= 1
        module = param.steps[depth][1]
        return Chain(module, param.steps[:depth], self._chained[id(module)])

    def is_output(self, param: ModelParameter) -> bool:
        """Return whether a weight is an output of the model, or belongs to an MLP whose result is one."""
        chain, widths = self.chain_of(param), widths_of(param.owner)
        if chain is None or widths is None or chain.layered:
            return False
        if widths.puts_out in self._targets:
            return True
        if chain.puts_out not in self._targets and (not self._ends_in_few(chain) or self._attends(chain)):
            return False
        return widths == chain.widths[-1] or self._is_head(chain)

    def is_projection(self, param: ModelParameter) -> bool:
        """Return whether the widths of a weight, and the readers of its result, show that it is a projection."""
        chain, widths = self.chain_of(param), widths_of(param.owner)
        if chain is None or widths is None or self._ends_in_few(chain):
            return False
        if chain.puts_out in self._targets | self._vocabularies:
            return False
        if isinstance(param.owner, nn.Linear) and widths.reads > MANY * widths.puts_out:
            return False
        # A LoRA factor has no position: its rank is not a size of the model, even if it equals a number of labels.
        position = self._positions.get(id(param.parameter))
        if widths.reads in self._vocabularies and position is not None and not self._is_put_out(widths.reads, position):
            return False
        # A convolution with few channels embeds pixels, as a matrix with few columns embeds coordinates.
        if _is_few(widths.reads, widths.puts_out) or (widths.reads <= CHANNELS and isinstance(param.owner, CONV_TYPES)):
            return False
        if chain.puts_out in self._tables:
            # The hidden size equals a number of tokens or positions. Heads come last, so look for readers in layers.
            return self._is_read(chain, self._layered)
        return self._is_read(chain) or (chain.reads == chain.puts_out and self._is_read_anywhere(chain))

    def is_layer(self, module: nn.Module) -> bool:
        """Return whether a numbered module is a layer, not one of several heads, whose results no matrix reads."""
        widths = self._chained[id(module)]
        if not widths:
            return True
        chain = Chain(module, (), widths)
        return not chain.ends_in_few and self._is_read_anywhere(chain)

    def _ends_in_few(self, chain: Chain) -> bool:
        """Return whether a chain ends in few rows that no later chain of its module reads, unlike a bottleneck."""
        if not chain.ends_in_few:
            return False
        outward = [chain.module, *(module for _, module in reversed(chain.steps))]
        is_listed = len(outward) > 1 and isinstance(outward[1], (nn.ModuleList, nn.ModuleDict))
        for module, outer in itertools.islice(itertools.pairwise(outward), 2 if is_listed else 1):
            length = len(module) if module is not chain.module else 0  # type: ignore[arg-type]
            children = list(outer.children())
            later = children[1 + next((i for i, child in enumerate(children) if child is module), len(children)) :]
            for child in later:
                # A list of bottlenecks is followed by as many chains, or by one chain that does not read coordinates.
                links = list(child.children())
                if not length or len(links) != length:
                    if length and chain.puts_out <= CHANNELS:
                        continue
                    links = [child]
                if all((widths := self._chained.get(id(c), ())) and widths[0].reads == chain.puts_out for c in links):
                    return False
        return True

    def _attends(self, chain: Chain) -> bool:
        """Return whether a chain is a query, key or value, by the names of its siblings or an output projection."""
        if not chain.steps:
            return False
        name, around = chain.steps[-1]
        siblings = dict(around.named_children())
        if _ATTENDS.fullmatch(name) and any("k" in other and _ATTENDS.fullmatch(other) for other in siblings):
            return True
        if len(chain.steps) == 1:
            return False  # a direct child of the model is a head
        children = list(siblings.values())
        after = children.index(chain.module)  # an attention ends in an output projection
        return any(
            first.in_features == chain.reads == last.out_features and first.out_features == last.in_features
            for first, last in itertools.product(children, children[after:])
            if first is not last and isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        )

    def _is_head(self, chain: Chain) -> bool:
        """Return whether a whole MLP is an output: it is short, smaller than the layers, and reads hidden states."""
        matrices = [module for module in chain.module.modules() if widths_of(module) is not None]
        if len(matrices) > LONGEST_HEAD or not all(isinstance(module, nn.Linear) for module in matrices):
            return False
        weights = sum(widths.reads * widths.puts_out for widths in chain.widths)
        first = min(self._positions_in(chain.module), default=len(self._positions))
        return weights < self._weights_in_layers and self._is_put_out(chain.reads, first)

    def _is_read(self, chain: Chain, among: Set[int] | None = None) -> bool:
        """Return whether later parameters, optionally only those `among` some positions, read the result of a chain."""
        last = max(self._positions_in(chain.module), default=-1)
        readers = self._readers.get(chain.puts_out, ())
        return any(position > last and (among is None or position in among) for position in readers)

    def _is_read_anywhere(self, chain: Chain) -> bool:
        inside = self._positions_in(chain.module)
        return any(position not in inside for position in self._readers.get(chain.puts_out, ()))

    def _positions_in(self, module: nn.Module) -> set[int]:
        return {self._positions[id(p)] for p in module.parameters() if id(p) in self._positions}

    def _is_put_out(self, width: int, position: int) -> bool:
        """Return whether a matrix before a position produces a width."""
        return self._put_out.get(width, position) < position

    def _widths_of(self, module: nn.Module) -> tuple[Widths, ...]:
        """Return the widths along a module that is a chain, else (). Its children must have been visited."""
        if (matrix := widths_of(module)) is not None:
            return (matrix,)
        if isinstance(module, (nn.ModuleDict, nn.ParameterDict, nn.ParameterList)):
            return ()
        if any(len(shape_of(parameter)) > 1 for parameter in module.parameters(recurse=False)):
            return ()
        links = []
        for name, child in module.named_children():
            following = self._chained.get(id(child), ())
            if following and not _ATTENDS.fullmatch(name):
                links.append(following)
            elif following or matrices_of(child):
                return ()
        # A module may define its matrices in any order; the last one is that of which no other reads the result.
        unread = [all(other is link or other[0].reads != link[-1].puts_out for other in links) for link in links]
        links = [links[i] for i in sorted(range(len(links)), key=unread.__getitem__)]
        if any(before[-1].puts_out != after[0].reads for before, after in itertools.pairwise(links)):
            return ()
        return tuple(widths for link in links for widths in link)


def widths_of(module: nn.Module) -> Widths | None:
    """Return the widths of a linear layer or a convolution; None for another module."""
    if isinstance(module, nn.Linear):
        return Widths(module.in_features, module.out_features)
    if isinstance(module, CONV_TYPES):
        return Widths(module.in_channels, module.out_channels)
    return None


def _in_layer(steps: Sequence[tuple[str, nn.Module]]) -> bool:
    return any(_LAYER.fullmatch(part) for part, _ in steps)


def _is_few(small: int, large: int) -> bool:
    return small <= MOST and small * FEW <= large


def _read(param: ModelParameter) -> Iterator[int]:
    """Yield the widths that a parameter reads: columns of a matrix, the size of a norm, both dims of a stack."""
    if isinstance(param.owner, EMBEDDING_TYPES):
        return
    widths = widths_of(param.owner)
    if widths is not None:
        if param.own_name == "weight":
            yield widths.reads
    elif len(param.shape) == 1:
        yield from param.shape if "norm" in type(param.owner).__name__.lower() and param.own_name == "weight" else ()
    else:
        yield from set(param.shape[-2:])
