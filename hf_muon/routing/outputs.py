"""What a matrix reads and who reads what it puts out: which ones are a model's outputs, and which are projections.

Nothing is run. A matrix is known by its widths, and matrices that follow one another in a module, each of which reads
what the one before puts out, are a chain: an MLP, or a projection alone. Three facts follow from where a chain ends:

- It ends in a row for each of the numbers that the model predicts (a label, one more for "none of them", a mel bin,
  an action), or in so few rows that they are no hidden size (the four sides of a box): an output. Keys and values of
  few heads, and bottlenecks, have few rows too; what stands beside them tells them apart.
- Others after it read what it ends in: a projection, whatever it is called, unless it ends in a vocabulary.
- Nobody reads what it ends in. That alone decides nothing, because results may be reshaped, or compared.
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

# Numbers that are no hidden state: this many at most, and at most one for so many on the other side.
MOST, FEW = 64, 16
# How many channels an image, or a wave, has at most.
CHANNELS = 15
# How many matrices an MLP has at most that is an output as a whole; more are a trunk, whose last matrix is one.
LONGEST_HEAD = 3
# What reads so many times as many numbers as it puts out is a table: a column for each token.
MANY = 8

_ATTENDS = re.compile(f"{QUERY.pattern}|wq|wk|wv")
# Modules that are layers without being numbered ones: `layer1`, `block_2`, `encoder_layer_0`.
_LAYER = re.compile(r"[0-9]+|(.*_)?(layer|block|stage)s?_?[0-9]+", re.IGNORECASE)


class Widths(NamedTuple):
    """How many numbers a matrix reads, and puts out, for each token or pixel."""

    reads: int
    puts_out: int


@dataclass(frozen=True)
class Chain:
    """Matrices that follow one another.

    Attributes:
        module: the outermost module that holds nothing else.
        name: of this module in the one around it.
        around: the module around it; None where it is the model.
        beyond: the modules further out, from the model on.
        layered: whether it stands in a layer, which is a numbered module.
        widths: of each of its matrices.
    """

    module: nn.Module
    name: str
    around: nn.Module | None
    beyond: tuple[nn.Module, ...]
    layered: bool
    widths: tuple[Widths, ...]

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
    """The chains of a model, and who reads what.

    Args:
        model: the model.
        places: its parameters.
        vocabularies: the sizes of sets of tokens, which embeddings read.
        targets: how many numbers it predicts for each token, by its config: labels, mel bins, actions.
    """

    def __init__(
        self, model: nn.Module, places: Sequence[ModelParameter], vocabularies: set[int], targets: set[int]
    ) -> None:
        self._chained: dict[int, tuple[Widths, ...]] = {}
        for module in reversed(list(model.modules())):
            self._chained[id(module)] = self._widths_of(module)
        self._in_layers = {
            place.owner.in_features
            for place in places
            if isinstance(place.owner, nn.Linear)
            and (any(part.isdigit() for part, _ in place.steps) or _in_layer(place.steps[:-2]))
        }
        self._vocabularies = vocabularies
        self._targets = targets - self._in_layers
        # Sizes of vocabularies that no config names, but also of positions.
        self._tables = {place.shape[0] for place in places if isinstance(place.owner, EMBEDDING_TYPES)}
        # What matrices put out and tables hold, in the model's order, for those that read it later on.
        self._put_out: dict[int, int] = {}
        for position, place in enumerate(places):
            if isinstance(place.owner, EMBEDDING_TYPES):
                self._put_out.setdefault(place.shape[-1], position)
            elif (widths := widths_of(place.owner)) and not _is_few(widths.puts_out, widths.reads):
                self._put_out.setdefault(widths.puts_out, position)
        self._positions = {id(place.parameter): position for position, place in enumerate(places)}
        self._readers: dict[int, list[int]] = {}  # the positions of those that read a width
        for position, place in enumerate(places):
            for width in _read(place):
                self._readers.setdefault(width, []).append(position)
        self._layered = {position for position, place in enumerate(places) if self._is_layered(place)}
        self._weights_in_layers = sum(
            math.prod(places[position].shape)
            for position in self._layered
            if isinstance(places[position].owner, nn.Linear)
        )

    def _is_layered(self, place: ModelParameter) -> bool:
        chain = self.chain_of(place)
        return _in_layer(place.steps[:-2]) if chain is None else chain.layered

    def chain_of(self, place: ModelParameter) -> Chain | None:
        """The longest chain with this matrix; None for what is no weight of a linear layer or a convolution."""
        if place.own_name != "weight" or widths_of(place.owner) is None:
            return None
        depth = len(place.steps) - 1  # of the module that is the chain: the steps before it lead there
        while depth > 0 and self._chained[id(place.steps[depth - 1][1])]:
            depth -= 1
        module = place.steps[depth][1]
        name, around = place.steps[depth - 1] if depth else ("", None)
        beyond = tuple(outer for _, outer in place.steps[: max(depth - 1, 0)])
        layered = _in_layer(place.steps[: max(depth - 1, 0)])
        return Chain(module, name, around, beyond, layered, self._chained[id(module)])

    def is_output(self, place: ModelParameter) -> bool:
        """Whether a weight is a model's output, or belongs to an MLP that makes one of the model's hidden states."""
        chain, own = self.chain_of(place), widths_of(place.owner)
        if chain is None or own is None or chain.layered:
            return False
        if own.puts_out in self._targets:
            return True
        if chain.puts_out not in self._targets and (not self._ends_in_few(chain) or self._attends(chain)):
            return False
        return own == chain.widths[-1] or self._is_head(chain)

    def is_projection(self, place: ModelParameter) -> bool:
        """Whether a weight is known to be no table and no output, because of what it reads and who reads from it."""
        chain, own = self.chain_of(place), widths_of(place.owner)
        if chain is None or own is None or self._ends_in_few(chain):
            return False
        # Inside of a layer, what layers read is a hidden size; elsewhere it may be as many tokens.
        vocabularies = self._vocabularies - self._in_layers if chain.layered else self._vocabularies
        if chain.puts_out in self._targets | vocabularies:
            return False
        if isinstance(place.owner, nn.Linear) and own.reads > MANY * own.puts_out:
            return False
        if own.reads in vocabularies and not self._is_put_out(own.reads, self._positions[id(place.parameter)]):
            return False
        # A convolution of few channels embeds pixels, as a matrix of few columns embeds coordinates.
        if _is_few(own.reads, own.puts_out) or (own.reads <= CHANNELS and isinstance(place.owner, CONV_TYPES)):
            return False
        if chain.puts_out in self._tables:
            # As many tokens, or positions, as a hidden size: heads come after the layers, whatever follows them.
            return self._is_read(chain, self._layered)
        return self._is_read(chain) or (chain.reads == chain.puts_out and self._is_read_anywhere(chain))

    def is_layer(self, module: nn.Module) -> bool:
        """Whether a numbered module is a layer, and not one of several heads: MLPs of whose results nobody reads."""
        widths = self._chained[id(module)]
        if not widths:
            return True
        chain = Chain(module, "", None, (), False, widths)
        return not chain.ends_in_few and self._is_read_anywhere(chain)

    def _ends_in_few(self, chain: Chain) -> bool:
        """Few rows are an output, or a bottleneck, from which a chain beside it that follows leads out again."""
        if not chain.ends_in_few:
            return False
        inside: list[nn.Module] = [chain.module]
        if isinstance(chain.around, (nn.ModuleList, nn.ModuleDict)):
            inside.append(chain.around)
        for module, outer in zip(inside, [chain.around, *chain.beyond[::-1]], strict=False):
            length = len(module) if module is not chain.module else 0  # type: ignore[arg-type]
            children = list(outer.children()) if outer is not None else []
            later = children[1 + next((i for i, child in enumerate(children) if child is module), len(children)) :]
            for child in later:
                # A list of chains is led out again by as many others, or by one that is not fed with coordinates.
                links = list(child.children())
                if not length or len(links) != length:
                    if length and chain.puts_out <= CHANNELS:
                        continue
                    links = [child]
                if all((widths := self._chained.get(id(c), ())) and widths[0].reads == chain.puts_out for c in links):
                    return False
        return True

    def _attends(self, chain: Chain) -> bool:
        """Whether it is a query, key or value: by names beside it, or because others there lead out and back again."""
        around = chain.around
        if around is None:
            return False
        beside = dict(around.named_children())
        if _ATTENDS.fullmatch(chain.name) and any("k" in name and _ATTENDS.fullmatch(name) for name in beside):
            return True
        if not chain.beyond:
            return False  # what a model holds itself are heads
        children = list(beside.values())
        after = children.index(chain.module)  # the way back is what an attention ends in
        return any(
            first.in_features == chain.reads == last.out_features and first.out_features == last.in_features
            for first, last in itertools.product(children, children[after:])
            if first is not last and isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        )

    def _is_head(self, chain: Chain) -> bool:
        """Whether a whole MLP is an output: a short one of hidden states, which layers make and which hold more."""
        matrices = [module for module in chain.module.modules() if widths_of(module) is not None]
        if len(matrices) > LONGEST_HEAD or not all(isinstance(module, nn.Linear) for module in matrices):
            return False
        weights = sum(widths.reads * widths.puts_out for widths in chain.widths)
        return weights < self._weights_in_layers and self._reads_hidden(chain)

    def _is_read(self, chain: Chain, among: Set[int] | None = None) -> bool:
        """Whether others after it, or those of them that are named, read what it puts out."""
        last = max(self._positions_in(chain.module), default=-1)
        readers = self._readers.get(chain.puts_out, ())
        return any(position > last and (among is None or position in among) for position in readers)

    def _is_read_anywhere(self, chain: Chain) -> bool:
        inside = self._positions_in(chain.module)
        return any(position not in inside for position in self._readers.get(chain.puts_out, ()))

    def _positions_in(self, module: nn.Module) -> set[int]:
        return {self._positions[id(p)] for p in module.parameters() if id(p) in self._positions}

    def _reads_hidden(self, chain: Chain) -> bool:
        """Whether a chain reads what is put out before it."""
        return self._is_put_out(chain.reads, min(self._positions_in(chain.module), default=len(self._positions)))

    def _is_put_out(self, width: int, position: int) -> bool:
        """Whether something before a position puts it out."""
        return self._put_out.get(width, position) < position

    def _widths_of(self, module: nn.Module) -> tuple[Widths, ...]:
        """The widths along a module that is a chain; nothing for one that is none. Those inside of it come first."""
        own = widths_of(module)
        if own is not None:
            return (own,)
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
        # Whose results no other one reads comes last, wherever it is defined.
        unread = [all(other is link or other[0].reads != link[-1].puts_out for other in links) for link in links]
        links = [links[i] for i in sorted(range(len(links)), key=unread.__getitem__)]
        if any(before[-1].puts_out != after[0].reads for before, after in itertools.pairwise(links)):
            return ()
        return tuple(widths for link in links for widths in link)


def widths_of(module: nn.Module) -> Widths | None:
    """The widths of a linear layer or a convolution; None for another module."""
    if isinstance(module, nn.Linear):
        return Widths(module.in_features, module.out_features)
    if isinstance(module, CONV_TYPES):
        return Widths(module.in_channels, module.out_channels)
    return None


def _in_layer(steps: Sequence[tuple[str, nn.Module]]) -> bool:
    return any(_LAYER.fullmatch(part) for part, _ in steps)


def _is_few(few: int, many: int) -> bool:
    return few <= MOST and few * FEW <= many


def _read(place: ModelParameter) -> Iterator[int]:
    """The widths that a parameter reads: the columns of a matrix, the size of a norm; of a stack both of its dims."""
    if isinstance(place.owner, EMBEDDING_TYPES):
        return
    widths = widths_of(place.owner)
    if widths is not None:
        if place.own_name == "weight":
            yield widths.reads
    elif len(place.shape) == 1:
        yield from place.shape if "norm" in type(place.owner).__name__.lower() and place.own_name == "weight" else ()
    else:
        yield from set(place.shape[-2:])
