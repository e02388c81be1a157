"""`linnet spectrum`: spectrum and alignment of the tangent kernel, with a recommendation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal


def task_spectrum(
    *,
    run: Path | None = None,
    model: str | None = None,
    data: Path | None = None,
    out: Path | None = None,
    weights: Path | None = None,
    model_args: dict[str, Any] | None = None,
    shots: int | None = None,
    tests: int | None = None,
    ridge: float | Literal["auto", "loo", "gcv", "evidence"] = "auto",
    solver: Literal["auto", "dual", "shared", "primal", "sketch", "cg"] = "auto",
    params: str | None = None,
    output: str | None = None,
    head: Literal["auto", "probe", "random", "zero", "keep"] = "auto",
    mean: str = "auto",
    std: str | None = None,
    size: int | None = None,
    channels: int | None = None,
    target: str | None = None,
    damaged: Literal["error", "skip"] = "error",
    top: int | None = None,
    samples: int | None = None,
    kernel: Path | None = None,
    part: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    trust: bool = False,
) -> dict[str, Any]:
    """Test whether a linear model suits a task: the kernel's spectrum, the labels in it, and a verdict.

    Args:
        run: The folder of a finished run to look at; then no data are named.
        model: The network: ``path/to/file.py:factory``, ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME``;
            beside a run its factory, where the run's own is not here or not to be run.
        data: The data: an image folder with one folder per class, an ``.npz`` archive or a ``.csv`` table.
        out: The folder for the report; spectrum in the run's folder by default.
        weights: A file of weights for the network with its old head: ``.safetensors``, ``.npz``, or torch's.
        model_args: Keyword arguments of the factory, as a JSON object.
        shots: Training samples of each class, or of all in a regression; all there are by default.
        tests: Test samples to evaluate on, drawn at random; all by default.
        ridge: The ridge, a positive number, or how to choose it: auto, loo, gcv, evidence.
        solver: How to solve: dual (the kernel), shared (one kernel for all outputs, for many), primal (the
            matrix of the weights), sketch (the same along 2,048 directions of the weights), cg (conjugate
            gradients), or auto.
        params: The parameters to fit, by name or regular expression; all of them by default.
        output: The part of what the network returns that is taken, such as pooler_output; by default its
            logits, or the mean of last_hidden_state.
        head: The head to start from: probe (a linear probe), random, zero, keep or auto, as for linnet adapt.
        mean: Normalization of images: imagenet, cifar, half, none, or one or three numbers with commas. auto
            is what the network's own configuration says (timm, Hugging Face), or none.
        std: Standard deviations that go with numbers in mean.
        size: Height and width that images are scaled to, in pixels.
        channels: Color channels that the network expects, 1 or 3.
        target: The column of a table to predict; the last by default.
        damaged: What to do with image files that cannot be decoded: error, or skip, which names them.
        top: Leading directions of the kernel to speak of; 50 by default, or a fifth of all if fewer.
        samples: Training samples to take the spectrum on, drawn at random; by default all, or as many as the
            memory and a few seconds allow where the kernel is not there already.
        kernel: A file for the kernel, NAME.npy, which stays. What parts or an earlier call have made of it is
            taken; the kernel of other weights, data or settings is refused.
        part: Compute one part of the kernel into that file, and nothing else: 3/64 is the fourth of 64, such
            as a task of an array job. Afterwards the same command without --part, and with --out, goes on.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        seed: Seed of the split and of the draws.
        trust: Whether to run code that a run of another user names.

    Returns:
        Eigenvalues, the labels' share of the leading directions, their alignment, leave-one-out, the
        linearity gap, and the verdict with its reasons; of a part, which others are missing.

    Raises:
        InputError: Neither a run nor a network with data is named, or both; or the kernel's file is that of
            another run.
    """
    from linnet.app.runs.pages import write
    from linnet.app.runs.settings import check_device
    from linnet.app.runs.spectrum import (
        check_counts,
        check_place,
        examine,
        from_run,
        from_settings,
        made_part,
        page_of,
        print_spectrum,
        result_of,
    )

    chosen = None if part is None else _part(part, kernel)
    _check_subject(run, model, data, out, chosen is not None)
    if kernel is not None:
        _check_kernel(run, solver, ridge)
    folder = out if out is not None else Path(run or "") / "spectrum"
    if chosen is None:
        check_place(folder, run)
    check_counts(top, samples)
    is_new = not folder.exists()
    check_device(device)
    if run is not None:
        subject, title = from_run(run, device, memory, model, trust), f"Linearity of {run.name}"
    else:
        from linnet.app.data import image_transform
        from linnet.app.runs.settings import Network, Settings, Solving, Source

        assert model is not None
        assert data is not None
        transform = image_transform("none" if mean == "auto" and std is None else mean, std, size, channels)
        settings = Settings(
            Network(model, weights, model_args or {}, head, output=output),
            Source(data, transform, shots, tests, seed, target, damaged, mean == "auto"),
            Solving(ridge, solver, params, memory, device, metric="none", method="linear", kernel=kernel),
        )
        if chosen is not None:
            assert kernel is not None
            result, said = made_part(settings, kernel, chosen)
            print(said)
            return result
        subject = from_settings(settings, folder)
        title = f"Linearity of {data.stem} for {model.rpartition(':')[2]}"
    try:
        found = examine(subject, top, samples, memory)
    except BaseException:
        if is_new:
            _remove_if_empty(folder)
        raise
    result = result_of(found, title, folder)
    write(folder, result, page_of(found, title))
    for line in print_spectrum(found, title, folder):
        print(line)
    return result


def _remove_if_empty(folder: Path) -> None:
    """Take away a folder that was made for a report and holds nothing."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _part(part: str, kernel: Path | None) -> tuple[int, int]:
    """Which part of how many, and a file that it is of."""
    from linnet.errors import InputError

    index, _, of = part.partition("/")
    if not (index.isdecimal() and of.isdecimal() and int(index) < int(of)):
        raise InputError(
            f"part is {part!r}",
            expected="which part, from 0, and the number of parts",
            remedy="pass --part 3/64 for the fourth of 64",
        )
    if kernel is None:
        raise InputError(
            "--part is given without --kernel",
            expected="the file of the kernel that all parts write to",
            remedy="pass --kernel kernel.npy, on a file system that all parts share",
        )
    return int(index), int(of)


def _check_kernel(run: Path | None, solver: str, ridge: float | str) -> None:
    """Require a fit that forms the kernel."""
    from linnet.errors import InputError

    if run is not None:
        raise InputError(
            "--kernel given together with --run",
            expected="a network with data: the fit of a run has its kernel",
            remedy="leave one of the two out",
        )
    if solver not in ("auto", "dual") or (solver == "auto" and not isinstance(ridge, str)):
        raise InputError(
            f"--kernel given with --solver {solver} and --ridge {ridge}",
            expected="a fit that forms the kernel",
            remedy="pass --solver dual, or leave --kernel out",
        )


def _check_subject(
    run: Path | None, model: str | None, data: Path | None, out: Path | None, is_part: bool
) -> None:
    """Require a run, or a network with its data and a folder for the report, and not both."""
    from linnet.errors import InputError

    given = {"--model": model, "--data": data}
    if is_part and (run or out) is not None:
        raise InputError(
            f"--part given together with --{'run' if run is not None else 'out'}",
            expected="a network with data and the file of its kernel",
            remedy="leave it out; the report is of the same command without --part",
        )
    if run is not None:
        if data is not None:
            raise InputError(
                "--data given together with --run",
                expected="a finished run, or a network with data",
                remedy="leave one of the two out",
            )
        return
    needed = given if is_part else {**given, "--out": out}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} must be given where there is no --run",
            expected="linnet spectrum --run RUN, or linnet spectrum --model M --data D --out FOLDER",
            remedy="linnet spectrum --help shows every option",
        )
