"""``linnet.load_gp``: loads a saved tangent Gaussian process."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from linnet.fitting.load_fit import OTHER
from linnet.likelihoods import from_description
from linnet.linear.files import read_solution, restored_system
from linnet.linear.problem import Problem
from linnet.tangent.batch import batch_size
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.matching import given_network, matching_function, require_same_outputs
from linnet.tangent.modes import in_exact_mode
from linnet.tangent_gp.files import KIND
from linnet.tangent_gp.tangent_gp import TangentGP


@in_exact_mode
def load_gp(directory: str | Path, model: nn.Module, output: OutputAdapter = None) -> TangentGP:
    """Read a process that ``TangentGP.save`` wrote.

    Args:
        directory: The folder, or the file itself.
        model: The network that it was made of, with the same weights, or its linearization.
        output: The output adapter, if the process was made with a callable one.

    Returns:
        The process, able to do all that it could before.

    Raises:
        FileFormatError: If the file is truncated, altered, not linnet's, or of another network.
        InputError: If there is no such file, or ``output`` is needed and not given.

    Example:
        >>> import linnet, tempfile, torch
        >>> net, x = nn.Linear(2, 1), torch.ones(3, 2).cumsum(0)
        >>> folder = tempfile.mkdtemp()
        >>> _ = TangentGP(net, linnet.likelihoods.Gaussian(variance=0.5)).fit(x, x[:, :1]).save(folder)
        >>> load_gp(folder, net).likelihood
        Gaussian(variance=0.5, masked=False, axis=1)
    """
    path, tensors, x, metadata = read_solution(directory, KIND)
    network = given_network(model)
    base = matching_function(network, metadata, output, path, OTHER)
    tensors = {key: t.to(base.device) for key, t in tensors.items()}
    given = dict(metadata["options"])
    given |= {"params": metadata["parameters"], "output": base.output}
    gp = TangentGP(
        network,
        from_description(metadata["likelihood"]),
        prior_precision=metadata["prior_precision"],
        noise_scale=metadata["noise_scale"],
        **given,
    )
    residual, weights, y = (tensors[key] for key in ("residual", "weights", "y"))
    problem = Problem(gp._observed.function, x, residual, weights, y)
    state, options = (tensors, metadata["solved"]), gp._options
    gp._restore(restored_system(problem, state, options.memory, options.iteration))
    y = y.reshape(gp._observed.shape_of(x))
    require_same_outputs(
        lambda few: gp._observed.problem(few, y[: batch_size(few)]).residual, x, residual, path, OTHER
    )
    return gp
