"""Newton-Schulz coefficients as data, each preset with its source.

A step with coefficients ``(a, b, c)`` maps every singular value ``s`` to ``a*s + b*s**3 + c*s**5``. The range of a
preset holds what its steps map ``[1e-3, 1]`` to, the singular values of a matrix of Frobenius norm one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Triple = tuple[float, float, float]
Steps = tuple[Triple, ...]
"""``(a, b, c)`` of each Newton-Schulz step of an orthogonalization."""
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]
"""A value of the option `ns_coefficients`."""
DEFAULT_STEPS = 5
AUTO = "auto"
"""The value of `ns_steps` for the number of steps that belongs to the coefficients."""


@dataclass(frozen=True)
class Preset:
    """A named sequence of Newton-Schulz steps. A prefix is right for fewer steps; for more, the last one is repeated.

    Attributes:
        steps: one ``(a, b, c)`` per step.
        singular_range: smallest and largest singular value after the default steps, for inputs in ``[1e-3, 1]``.
    """

    steps: Steps
    singular_range: tuple[float, float]


# Shrinks the input of each step of Polar Express, so that rounding cannot push a singular value out of its range.
_MARGIN = 1.01

PRESETS: dict[str, Preset] = {
    # Amsel, Persson, Musco, Gower: The Polar Express, Algorithm 1, https://arxiv.org/abs/2505.16932. Each step is
    # optimal given the ones before; from the eighth on they are (15/8, -10/8, 3/8) to double precision.
    "polar_express": Preset(
        steps=(
            *(
                (a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5)
                for a, b, c in (
                    (8.28721201814563, -23.595886519098837, 17.300387312530933),
                    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
                    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
                    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
                )
            ),
            (1.875, -1.25, 0.375),
        ),
        singular_range=(0.846, 1.141),
    ),
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/.
    "original": Preset(steps=((3.4445, -4.7750, 2.0315),), singular_range=(0.470, 1.203)),
}


def resolve(ns_coefficients: Coefficients, ns_steps: int | str = AUTO) -> Steps:
    """Return the Newton-Schulz steps that two options ask for.

    Args:
        ns_coefficients: name of a preset, three numbers for every step, or three numbers for each of several steps.
        ns_steps: number of steps, at least one, or ``auto``: as many as are listed, else five.

    Raises:
        ValueError: an unknown preset, not three numbers, or another number of steps than are listed.
    """
    number = DEFAULT_STEPS if ns_steps == AUTO else int(ns_steps)
    if isinstance(ns_coefficients, str):
        if ns_coefficients not in PRESETS:
            raise ValueError(
                f"ns_coefficients={ns_coefficients!r} is not a preset. Valid: {', '.join(PRESETS)}, or three numbers, "
                "for all steps or for each [invalid-value]"
            )
        steps = PRESETS[ns_coefficients].steps
        return (steps + steps[-1:] * (number - len(steps)))[:number]
    triples = [triple for triple in ns_coefficients if isinstance(triple, Sequence)]
    if not triples:
        return (_triple(ns_coefficients, ns_coefficients),) * number
    listed = len(ns_coefficients)
    if ns_steps not in (AUTO, listed):
        raise ValueError(
            f"ns_steps={ns_steps}: ns_coefficients lists {listed} steps, three numbers for each. Leave ns_steps out, "
            f"or set ns_steps={listed} [ns-steps-misfit]"
        )
    return tuple(_triple(triple, ns_coefficients) for triple in ns_coefficients)


def _triple(numbers: object, ns_coefficients: Coefficients) -> Triple:
    if not isinstance(numbers, Sequence) or len(numbers) != 3:
        raise ValueError(
            f"ns_coefficients={ns_coefficients!r}: expected a preset's name, three numbers, or three for "
            "each step [invalid-value]"
        )
    a, b, c = (float(x) for x in numbers)
    return a, b, c
