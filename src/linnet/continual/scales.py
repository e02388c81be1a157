"""Conversion of regularization strengths between libraries."""

from __future__ import annotations

from linnet.params import choice, number

SCALES = ("linnet", "averaged", "mammoth", "avalanche")


def convert_strength(
    strength: float, source: str, to: str = "linnet", *, old: float, new: float, batch: float = 1.0
) -> float:
    """A penalty's strength λ in another library's scale.

    Everyone adds a quadratic to the loss of the new task and calls its factor λ; what differs is whether
    loss and Fisher matrix are sums or means, and the factor ½. On a loss that is a mean over N new examples,
    with F summed and F̄ averaged over the N₀ old ones, the same penalty is

        "linnet"      λ/N · ½ δᵀ F δ            λ = 1 is Bayes' rule (Botev 2020, eq. 5.25)
        "averaged"    λ ½ δᵀ F̄ δ               Kirkpatrick et al. 2017, van de Ven:  λ_linnet · N₀/N
        "mammoth"     λ δᵀ F̄ δ                 no ½:                                  λ_linnet · N₀/(2N)
        "avalanche"   λ δᵀ F_b δ, F_b ≈ F̄/b     squared gradients of batches of b:     λ_linnet · b N₀/(2N)

    The last holds in expectation, for gradients of examples that are uncorrelated and have mean zero, and
    Mammoth also weights examples by their probability: both are orders of magnitude, not identities.

    Args:
        strength: λ in the scale of ``source``.
        source: "linnet", "averaged", "mammoth" or "avalanche".
        to: The scale that is wanted.
        old: N₀, examples behind the Fisher matrix.
        new: N, examples of the new task.
        batch: b, for "avalanche".

    Returns:
        λ in the scale of ``to``.

    Raises:
        InputError: If a scale is unknown or a number is not positive.

    Example:
        >>> convert_strength(1.0, "linnet", "averaged", old=60000, new=10000)
        6.0
        >>> convert_strength(6.0, "averaged", old=60000, new=10000)
        1.0
    """
    strength = number("strength", strength, least=0)
    ratio = number("old", old, above=0) / number("new", new, above=0)
    factors = {
        "linnet": 1.0,
        "averaged": ratio,
        "mammoth": ratio / 2,
        "avalanche": number("batch", batch, above=0) * ratio / 2,
    }
    for name, scale in (("source", source), ("to", to)):
        choice(name, scale, SCALES, "pass one of these")
    return strength * factors[to] / factors[source]
