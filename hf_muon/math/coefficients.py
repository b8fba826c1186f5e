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
    """A named sequence of Newton-Schulz steps.

    Attributes:
        steps: one ``(a, b, c)`` per step.
        singular_range: smallest and largest singular value after the default steps, for inputs in ``[1e-3, 1]``.
        source: where the numbers were published.
        repeat_last: whether the last step is repeated if more steps are asked for than listed.
        truncates: whether the first steps are a good choice if fewer are asked for than listed. The default is
            then five steps, and else all.
        singular_range_of_four: the same after four steps, which cost a fifth less; None if the preset needs five.
    """

    steps: tuple[Triple, ...]
    singular_range: tuple[float, float]
    source: str
    repeat_last: bool = False
    truncates: bool = False
    singular_range_of_four: tuple[float, float] | None = None


def _with_margin(steps: Sequence[Triple], margin: float) -> tuple[Triple, ...]:
    """Shrink the input of each step by ``margin``, so that rounding cannot push a singular value out of its range."""
    return tuple((a / margin, b / margin**3, c / margin**5) for a, b, c in steps)


_JORDAN: Triple = (3.4445, -4.7750, 2.0315)

PRESETS: dict[str, Preset] = {
    # Amsel, Persson, Musco, Gower: The Polar Express, Algorithm 1. Each step is optimal given the ones before, so a
    # prefix is right for fewer steps; from the eighth on they are (15/8, -10/8, 3/8) to double precision.
    "polar_express": Preset(
        steps=(
            *_with_margin(
                (
                    (8.28721201814563, -23.595886519098837, 17.300387312530933),
                    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
                    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
                    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
                ),
                1.01,
            ),
            (1.875, -1.25, 0.375),
        ),
        singular_range=(0.846, 1.141),
        source="https://arxiv.org/abs/2505.16932",
        repeat_last=True,
        truncates=True,
        singular_range_of_four=(0.422, 1.561),
    ),
    "original": Preset(
        steps=(_JORDAN,),
        singular_range=(0.470, 1.203),
        source="https://kellerjordan.github.io/posts/muon/",
        repeat_last=True,
        truncates=True,
    ),
    # Each step maximizes the slope at zero of the composition, within a bound on its error.
    "you_jiacheng": Preset(
        steps=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        singular_range=(0.474, 1.146),
        source="https://x.com/YouJiacheng/status/1905861218138804534",
    ),
    # Grishina, Smirnov, Rakhuba: Accelerating Newton-Schulz iteration for orthogonalization via Chebyshev-type
    # polynomials. Each step is optimal given the ones before, for inputs in [1e-3, 1]. At the upper end of its range a
    # step is so steep that rounding in bf16 leaves the range; hence the margin.
    "cans": Preset(
        steps=_with_margin(
            (
                (8.4703, -25.1081, 18.6293),
                (4.1828, -3.1087, 0.5806),
                (3.9619, -2.9541, 0.5630),
                (3.2866, -2.4647, 0.5074),
                (2.2737, -1.6447, 0.4162),
            ),
            1.02,
        ),
        singular_range=(0.826, 1.114),
        source="https://arxiv.org/abs/2506.10935",
        truncates=True,
        singular_range_of_four=(0.420, 1.546),
    ),
    # DeepSeek-V4, section 2.4, Algorithm 1: eight steps that approach one fast, two that converge to it.
    "deepseek_v4": Preset(
        steps=(_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        singular_range=(0.999, 1.003),
        source="https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/blob/main/DeepSeek_V4.pdf",
    ),
}


def resolve(ns_coefficients: Coefficients, ns_steps: int | str = AUTO) -> Steps:
    """Return the Newton-Schulz steps that two options ask for.

    Args:
        ns_coefficients: name of a preset, three numbers for every step, or three numbers for each of several steps.
        ns_steps: number of steps, at least one, or ``auto``: the preset's own, or as many as are listed, else five.

    Raises:
        ValueError: an unknown preset, not three numbers, or coefficients that are not defined for ``ns_steps``.
    """
    if isinstance(ns_coefficients, str):
        return _of_preset(ns_coefficients, ns_steps)
    triples = [triple for triple in ns_coefficients if isinstance(triple, Sequence)]
    if not triples:
        return (_triple(ns_coefficients, ns_coefficients),) * (DEFAULT_STEPS if ns_steps == AUTO else int(ns_steps))
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


def _of_preset(name: str, ns_steps: int | str) -> Steps:
    if name not in PRESETS:
        raise ValueError(
            f"ns_coefficients={name!r} is not a preset. Valid: {', '.join(PRESETS)}, or three numbers, for all steps "
            "or for each [invalid-value]"
        )
    preset = PRESETS[name]
    listed = len(preset.steps)
    default = DEFAULT_STEPS if preset.truncates else listed
    number = default if ns_steps == AUTO else int(ns_steps)
    if (number < listed and not preset.truncates) or (number > listed and not preset.repeat_last):
        bound = "at most" if preset.truncates else "exactly"
        raise ValueError(
            f"ns_steps={number}: the preset {name!r} is a sequence of {bound} {listed} steps. "
            f"Set ns_steps={listed}, or use polar_express or original, which work with any number [ns-steps-misfit]"
        )
    return (preset.steps + preset.steps[-1:] * max(0, number - listed))[:number]
