"""Spectrum and alignment of the tangent kernel of a network and a task, as ``linnet.spectrum``.

Three scales occur, and every docstring says which one it means. Gram matrices K = JJᵀ sum over
parameters and carry no factor of N; ridges and operators follow them. Functions and Mercer's eigenvalues
take means over the N examples, as in the source: λ_j = σ_j(K) / N, φ_j = √N u_j, α(f) = fᵀK f / N²,
‖f‖₂² = fᵀf / N. In the kernel norm ‖f‖²_Θ = fᵀK⁺f and in every ratio the factors cancel.

Source: Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, "What can linearized neural networks actually say about
generalization?", NeurIPS 2021.
"""

from __future__ import annotations

from linnet.spectrum.alignment import alignment, kernel_norm_bound
from linnet.spectrum.anisotropy import anisotropy_directions
from linnet.spectrum.eigenfunctions import eigenfunctions, energy_concentration
from linnet.spectrum.kernel_matrix import centered_alignment, gram, gram_part, kernel_distance
from linnet.spectrum.recorder import Recorder
from linnet.spectrum.spectral_density import (
    condition_number,
    effective_dimension,
    spectral_density,
)
from linnet.spectrum.task_linearity import (
    task_linearity,
)

__all__ = [
    "gram",
    "gram_part",
    "eigenfunctions",
    "alignment",
    "kernel_norm_bound",
    "energy_concentration",
    "kernel_distance",
    "centered_alignment",
    "effective_dimension",
    "condition_number",
    "spectral_density",
    "Recorder",
    "anisotropy_directions",
    "task_linearity",
]
