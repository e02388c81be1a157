"""`linnet export`: an adapted network as one file that runs without linnet."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def export(
    *,
    run: Path,
    out: Path = Path("model.pt2"),
    variance: bool = False,
    merge: bool = False,
    model: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Write an adapted network as one file that runs without linnet, in torch or in any ONNX runtime.

    The file takes raw samples, images as bytes or rows as numbers, and scales them as the run did. It has the
    names of the classes in it. Its probabilities have the uncertainty of the weights in them, as those of
    linnet predict have, where it gives variances too; otherwise they are those of the outputs alone.

    Args:
        run: The folder that linnet adapt, forget or update wrote.
        out: The file to write: ``.pt2`` for torch.export.load, ``.onnx`` for ONNX runtimes.
        variance: Whether the file gives the variance of each output too; where the lower layers take part
            it holds as many numbers as they have derivatives on the training samples.
        merge: Whether the file holds the network with the fit's weights, in place of the linear model: it is
            of the network's size, and its outputs are nearly the same. Not where lower layers take part.
        model: The network's factory, where the run's own is not here or not to be run.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        overwrite: Whether to replace a file that exists.
        trust: Whether to run code that a run of another user names.

    Returns:
        The file, what it takes and gives, and the names of the classes.
    """
    from linnet.app.runs.exporting import check_export, foretold, write_export
    from linnet.app.runs.folder import load_run
    from linnet.app.runs.settings import check_device
    from linnet.app.terminal import kept

    check_export(out, overwrite)
    check_device(device)
    opened = load_run(run, device, memory, model=model, trust=trust)
    told, seconds = foretold(opened, merge)
    print(told, flush=True)
    result = write_export(opened, out, variance, merge, seconds)
    print(f"{kept(result['file'])}: {result['bytes'] / 1e6:.2f} MB")
    print(f"  takes {result['input']}")
    print(f"  gives {', '.join(result['outputs'])}")
    if result["agreement"] is not None:
        same = f"{100 * result['agreement']:.0f} % of the training samples"
        print(f"  its class is that of the linear model for {same}")
    if "probabilities" in result["outputs"] and not (variance or merge):
        print("  its probabilities are of the outputs alone; predict's know their variance: --variance")
    return {"command": "export", **result}
