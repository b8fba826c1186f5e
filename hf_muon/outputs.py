"""What a matrix reads and who reads what it puts out: which ones are a model's outputs, and which are projections.

Nothing is run. A matrix is known by its widths, and matrices that follow one another in a module, each of which reads
what the one before puts out, are a chain: an MLP, or a projection alone. Three facts follow from where a chain ends:

- It ends in a row for each of the numbers that the model predicts (a label, one more for "none of them", a mel bin,
  an action), or in so few rows that they are no hidden size (the four sides of a box): an output.
- Others read what it ends in: a projection, whatever it is called.
- Nobody reads what it ends in. That alone decides nothing, because results may be reshaped, or compared.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from hf_muon.distributed.base import shape_of
from hf_muon.fused import QUERY
from hf_muon.places import CONV_TYPES, EMBEDDING_TYPES, Place, matrices_of

# Numbers that are no hidden state: this many at most, and at most one for so many on the other side.
MOST, FEW = 64, 16
# How many channels an image, or a wave, has at most.
CHANNELS = 15


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
        layered: whether it stands in a layer, which is a numbered module.
        widths: of each of its matrices.
    """

    module: nn.Module
    name: str
    around: nn.Module | None
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

    def __init__(self, model: nn.Module, places: Sequence[Place], vocabularies: set[int], targets: set[int]) -> None:
        self._chained: dict[int, tuple[Widths, ...]] = {}
        for module in reversed(list(model.modules())):
            self._chained[id(module)] = self._widths_of(module)
        self._readers = Counter(width for place in places for width in _read(place))
        self._in_layers = {
            place.owner.in_features
            for place in places
            if isinstance(place.owner, nn.Linear) and any(part.isdigit() for part, _ in place.steps)
        }
        self._vocabularies = vocabularies - self._in_layers
        self._targets = targets - self._in_layers
        # What matrices put out and tables hold, in the model's order, for those that read it later on.
        self._put_out: dict[int, int] = {}
        for position, place in enumerate(places):
            if isinstance(place.owner, EMBEDDING_TYPES):
                self._put_out.setdefault(place.shape[-1], position)
            elif (widths := widths_of(place.owner)) and not _is_few(widths.puts_out, widths.reads):
                self._put_out.setdefault(widths.puts_out, position)
        self._positions = {id(place.parameter): position for position, place in enumerate(places)}

    def chain_of(self, place: Place) -> Chain | None:
        """The longest chain with this matrix; None for what is no weight of a linear layer or a convolution."""
        if place.own_name != "weight" or widths_of(place.owner) is None:
            return None
        depth = len(place.steps) - 1  # of the module that is the chain: the steps before it lead there
        while depth > 0 and self._chained[id(place.steps[depth - 1][1])]:
            depth -= 1
        module = place.steps[depth][1]
        name, around = place.steps[depth - 1] if depth else ("", None)
        layered = any(part.isdigit() for part, _ in place.steps[: max(depth - 1, 0)])
        return Chain(module, name, around, layered, self._chained[id(module)])

    def is_output(self, place: Place) -> bool:
        """Whether a weight is a model's output, or belongs to an MLP that makes one of the model's hidden states."""
        chain, own = self.chain_of(place), widths_of(place.owner)
        if chain is None or own is None or chain.layered:
            return False
        if own.puts_out in self._targets:
            return True
        if chain.puts_out not in self._targets and not self._ends_in_few(chain):
            return False
        # A model that is an MLP from end to end has hidden matrices; so has a decoder of convolutions.
        linear = all(isinstance(m, nn.Linear) for m in chain.module.modules() if widths_of(m) is not None)
        return own == chain.widths[-1] or (linear and self._reads_hidden(chain))

    def is_projection(self, place: Place) -> bool:
        """Whether a weight is known to be no table and no output, because of what it reads and who reads from it."""
        chain, own = self.chain_of(place), widths_of(place.owner)
        if chain is None or own is None or self._ends_in_few(chain):
            return False
        if chain.puts_out in self._targets | self._vocabularies or own.reads in self._vocabularies:
            return False
        # A convolution of few channels embeds pixels, as a matrix of few columns embeds coordinates.
        if _is_few(own.reads, own.puts_out) or (own.reads <= CHANNELS and isinstance(place.owner, CONV_TYPES)):
            return False
        return self._is_read(chain)

    def is_layer(self, module: nn.Module) -> bool:
        """Whether a numbered module is a layer, and not one of several heads: MLPs of whose results nobody reads."""
        widths = self._chained[id(module)]
        if not widths:
            return True
        chain = Chain(module, "", None, False, widths)
        return not chain.ends_in_few and self._is_read(chain)

    def _ends_in_few(self, chain: Chain) -> bool:
        """Few rows are an output, or a bottleneck, from which a chain beside it that follows leads out again."""
        if not chain.ends_in_few:
            return False
        after = False
        for child in chain.around.children() if chain.around is not None else ():
            widths = self._chained.get(id(child), ())
            if after and widths and widths[0].reads == chain.puts_out:
                return False
            after = after or child is chain.module
        return True

    def _is_read(self, chain: Chain) -> bool:
        return self._readers[chain.puts_out] > sum(width.reads == chain.puts_out for width in chain.widths)

    def _reads_hidden(self, chain: Chain) -> bool:
        """Whether a chain reads what is put out before it."""
        first = min(self._positions.get(id(p), len(self._positions)) for p in chain.module.parameters())
        return self._put_out.get(chain.reads, first) < first

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
            if following and not QUERY.fullmatch(name):
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


def _is_few(few: int, many: int) -> bool:
    return few <= MOST and few * FEW <= many


def _read(place: Place) -> Iterator[int]:
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
