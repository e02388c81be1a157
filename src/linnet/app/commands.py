"""The commands of the command line: functions whose signature is the options and whose docstring is the help.

They are called NAME_command: a function called adapt would be taken for `linnet.adapt` by what reads its
options, and torch would be imported for a page of help.

Parameters are keyword-only. One whose type is a record of `linnet.app.options` stands for the fields of that
record. A command

* imports nothing heavy when it is imported: torch, numpy and the rest of linnet are imported inside, so that
  `linnet --help` answers at once;
* prints a short summary for people on standard output; progress goes to standard error;
* returns a dictionary of plain values, which `--json` prints instead of the summary. `"ok": False` in it
  makes the command end with status 1;
* raises a `linnet.errors.LinnetError` for anything that the user can put right;
* calls the folder it writes `out`: `linnet.app.cli` puts a replayable `run.yaml` there. With an `overwrite`
  beside it no other process writes there, and no run of other settings lies there, while the command runs;
* calls a network that it builds `model` and `model_args`: `linnet.app.cli` refuses code that only a
  settings file names;
* hands `trust`, a flag of the command line alone, on to what opens a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from linnet import __version__
from linnet.app.options import TEXTS, AdaptOptions, NetworkOptions, RunOptions, TaskOptions, listed
from linnet.app.terminal import kept
from linnet.errors import InputError

COMMANDS = (
    "demo", "adapt", "predict", "explain", "forget", "update", "compare", "serve",
    "export", "spectrum", "check", "doctor",
)  # fmt: skip
"""The commands, in the order in which help lists them."""


def _told(result: dict[str, Any], lines: Iterable[str]) -> dict[str, Any]:
    """Print a summary."""
    for line in lines:
        print(line)
    return result


def demo_command(*, out: Path = Path("runs/demo"), seed: int = 0, overwrite: bool = False) -> dict[str, Any]:
    """Adapt a small network to digits that it has never seen; then find wrong labels and forget them.

    Args:
        out: The folder for the data, the network, the runs and their reports.
        seed: Seed of everything that is random.
        overwrite: Whether to replace a run of other settings there, or to write beside other files.
    """
    from linnet.app.runs.demonstration import FLIPPED, adapt_digits, forget_flipped, prepare
    from linnet.app.runs.place import clear_run
    from linnet.app.runs.results import print_adaptation, print_change
    from linnet.report.records import Comparison

    if overwrite:
        clear_run(out)
    files, before = prepare(out, seed)
    print(
        f"1. A small network was trained on the digits 0 to 4 in {before['seconds']:.1f} s: "
        f"{100 * before['accuracy']:.1f} % right on others of them."
    )
    print("\n2. It is adapted to the digits 5 to 9 with 10 samples of each, by linear algebra.\n")
    adapted = adapt_digits(files, out, seed)
    _told(adapted, print_adaptation(adapted))
    print(f"\n3. The same with {FLIPPED} labels flipped. Leave-one-out finds labels that look wrong.\n")
    recall, forgotten = forget_flipped(files, out, seed)
    print(f"flipped:       {', '.join(recall.wrong)}")
    print(f"most suspicious: {', '.join(recall.inspected)}   ({recall.found} of {FLIPPED} found)\n")
    _told(forgotten, print_change(forgotten))
    return {
        "command": "demo", "pretrained": before, "scores": adapted["scores"],
        "flipped": list(recall.wrong), "inspected": list(recall.inspected), "found": recall.found,
        "forgetting": {key: forgotten[key] for key in ("scores", "certificate", "difference", "seconds")},
        "best": max((Comparison(**row) for row in adapted["scores"]), key=lambda row: row.accuracy or 0).name,
        "out": str(out),
    }  # fmt: skip


def adapt_command(
    *, options: AdaptOptions, out: Path, quick: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Fit a trained network to a new task in closed form, and report how good and how sure it is.

    Args:
        out: The run folder to write. After an interruption the same command continues there.
        quick: Give a first answer in about half a minute: a linear probe of all samples, and whether the
            lower layers help, tried on as many as the time allows, at least five per class.
        overwrite: Whether to replace a finished run of other settings there, or to write beside other files.
    """
    from functools import partial

    from linnet.app.runs.adaptation import adapt as run_adaptation
    from linnet.app.runs.adaptation import first_answer
    from linnet.app.runs.folder import keep_fit
    from linnet.app.runs.results import keep_adaptation, print_adaptation

    if options.data.suffix == TEXTS:
        from linnet.app.runs import adapter

        return _told(*adapter.adapt(options, out, quick, overwrite))
    name = options.data.stem
    run = first_answer if quick else run_adaptation
    found = run(options, out, partial(keep_fit, out, overwrite=overwrite))
    title = name if options.model is None else f"{name} from {found.run.origin.spec.rpartition(':')[2]}"
    result = keep_adaptation(found, out, title, replay=True)
    return _told(result, print_adaptation(result))


def predict_command(
    *,
    options: RunOptions,
    data: Path,
    out: Path | None = None,
    std: bool = True,
    coverage: float | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Predict new samples with an adapted network, with probabilities and standard deviations.

    Args:
        data: The samples: a folder of images, an ``.npz`` archive with x or x_test, a table with
            the run's columns, or a ``.jsonl`` file of texts. Answers are used to score the predictions where
            there are any.
        out: The file to write, ``.csv`` or ``.json``; predictions.csv in the run's folder by default.
        std: Whether to compute standard deviations, which takes longer than the predictions themselves.
            Without them probabilities are others: of the outputs alone.
        coverage: Write beside each prediction a set of classes, or the ends of an interval, that holds the
            answer so often, such as 0.9: by the fits without each training sample.
        overwrite: Whether to replace a file that exists, where one is named by out.
    """
    from linnet.app.runs import adapter
    from linnet.app.runs.queries import predict

    if adapter.is_adapter(options.run):
        return _told(*adapter.predict(options, data, out, std, coverage, overwrite))
    return _told(*predict(options, data, out, std, coverage, overwrite))


def explain_command(
    *,
    options: RunOptions,
    ids: list[str] | None = None,
    data: Path | None = None,
    top: int = 5,
    out: Path | None = None,
) -> dict[str, Any]:
    """Show the training samples that pushed a prediction up and down.

    Args:
        ids: Ids of the samples to explain, such as test/3,test/17, or names of image files; must be given
            but for texts of data, all of which are meant then. Names that hold a comma are given as a JSON
            list.
        data: Where these samples are; the run's own test samples by default, of a run on texts its training
            texts.
        top: Training samples to name on each side.
        out: The folder for the report; explain in the run's folder by default.
    """
    from linnet.app.runs import adapter
    from linnet.app.runs.queries import explain

    if adapter.is_adapter(options.run):
        return _told(*adapter.explain(options, data, ids, top, out))
    if ids is None:
        raise InputError("--ids must be given", "ids of samples", "name some, such as --ids test/3")
    return _told(*explain(options, data, ids, top, out))


def forget_command(
    *, options: RunOptions, ids: list[str], out: Path, verify: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Forget training samples: the fit without them, exactly and without training.

    Args:
        ids: Ids of the training samples, such as train/3,train/17, or names of image files, as the report
            and result.json have them. Names that hold a comma are given as a JSON list.
        out: The folder for the new run.
        verify: Also fit from scratch without the samples, kernel included, and compare; once more with means
            and scales of features that are theirs alone.
        overwrite: Whether to replace a finished run of other settings there, or to write beside other files.
    """
    from linnet.app.runs import adapter
    from linnet.app.runs.changes import forget, keep_change
    from linnet.app.runs.folder import opened

    if adapter.is_adapter(options.run):
        return _told(*adapter.forget(options, ids, out, verify, overwrite))
    change = forget(opened(options), ids, verify)
    title = f"{options.run.name} without {len(ids)} training sample{'s' * (len(ids) != 1)}"
    return _told(*keep_change(change, "forget", out, title, overwrite))


def update_command(
    *,
    options: RunOptions,
    data: Path,
    out: Path,
    new_class: str | list[str] | None = None,
    verify: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Add training samples to a fit, exactly and without training.

    Args:
        data: The samples with their answers: folders of images named for the classes, an ``.npz`` archive
            with x and y (or x_train and y_train), a table, or a ``.jsonl`` file of texts.
        out: The folder for the new run.
        new_class: A class among them that the run has not seen, each name once; such classes get the next
            numbers in the order in which they are named.
        verify: Also fit from scratch on all samples, kernel included, and compare.
        overwrite: Whether to replace a finished run of other settings there, or to write beside other files.
    """
    from linnet.app.runs import adapter
    from linnet.app.runs.changes import keep_change, update
    from linnet.app.runs.folder import opened

    if adapter.is_adapter(options.run):
        return _told(*adapter.update(options, data, out, verify, overwrite, new_class))
    change = update(opened(options), data, verify, listed(new_class))
    title = f"{options.run.name}, {len(change.added)} training samples added"
    return _told(*keep_change(change, "update", out, title, overwrite))


def compare_command(*, runs: list[str], out: Path | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Compare two runs on the same test samples, and name those that one of them gets wrong.

    Args:
        runs: The two folders that linnet adapt, forget or update wrote, the older one first. Their names may
            be typed without --runs.
        out: A file for all samples that one of the runs predicts better, ``.csv`` or ``.json``.
        overwrite: Whether to replace a file that exists.
    """
    from linnet.app.runs.comparing import compare_runs, comparison_rows, print_comparison
    from linnet.app.runs.place import check_file
    from linnet.app.runs.queries import TABLES, write_rows

    if len(runs) != 2:
        raise InputError(
            f"{len(runs)} run folder{'s' * (len(runs) != 1)} {'is' if len(runs) == 1 else 'are'} given",
            expected="two, as in linnet compare runs/old runs/new",
            remedy="name the older run, then the newer",
        )
    if out is not None:
        check_file(out, TABLES, overwrite)
    result = compare_runs(*map(Path, runs))
    if out is not None:
        write_rows(out, comparison_rows(result))
    return _told(result, [*print_comparison(result), *([f"samples: {kept(out)}"] if out else [])])


def serve_command(*, options: RunOptions, port: int = 0, browser: bool = False) -> dict[str, Any]:
    """Open a local page: predict a sample, see the training samples behind it, forget one, see what changes.

    The page is for this machine alone and opens with the key in the printed address. Nothing is written:
    what is forgotten there is forgotten until the server stops (Ctrl-C).

    Args:
        port: The port on this machine; one that is free by default.
        browser: Whether to open the page in a browser.
    """
    import contextlib
    import sys
    import webbrowser

    from linnet.app.runs import adapter
    from linnet.app.runs.folder import opened
    from linnet.app.serve.server import Asked, Server, Session
    from linnet.app.serve.texts import TextSession
    from linnet.params import integer

    integer("port", port, least=0, most=65535)
    name = options.run.resolve().name
    session: Asked[Any, Any]
    if adapter.is_adapter(options.run):
        session = TextSession(adapter.opened(options), name)
    else:
        session = Session(opened(options), name)
    with Server(session, port) as server:
        # on standard error, so that it is seen with --json and --quiet too
        print(f"{server.address}\nPress Ctrl-C to stop.", file=sys.stderr, flush=True)
        if browser:
            webbrowser.open(server.address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return {"command": "serve", "run": str(options.run), "port": server.server_port}


def export_command(
    *,
    options: RunOptions,
    out: Path = Path("model.pt2"),
    variance: bool = False,
    merge: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write an adapted network as one file that runs without linnet, in torch or in any ONNX runtime.

    The file takes raw samples, images as bytes or rows as numbers, and scales them as the run did. It has the
    names of the classes in it. Its probabilities have the uncertainty of the weights in them, as those of
    linnet predict have, where it gives variances too; otherwise they are those of the outputs alone.

    Args:
        out: The file to write: ``.pt2`` for torch.export.load, ``.onnx`` for ONNX runtimes.
        variance: Whether the file gives the variance of each output too; where the lower layers take part
            it holds as many numbers as they have derivatives on the training samples.
        merge: Whether the file holds the network with the fit's weights, in place of the linear model: it is
            of the network's size, and its outputs are nearly the same. Not where lower layers take part.
        overwrite: Whether to replace a file that exists.
    """
    from linnet.app.runs.exporting import check_export, write_export
    from linnet.app.runs.folder import opened

    check_export(out, overwrite)
    result = write_export(opened(options), out, variance, merge)
    lines = [
        f"{kept(result['file'])}: {result['bytes'] / 1e6:.2f} MB",
        f"  takes {result['input']}",
        f"  gives {', '.join(result['outputs'])}",
    ]
    if result["agreement"] is not None:
        same = f"{100 * result['agreement']:.0f} % of the training samples"
        lines.append(f"  its class is that of the linear model for {same}")
    if "probabilities" in result["outputs"] and not (variance or merge):
        known = "predict's know their variance: --variance"
        lines.append(f"  its probabilities are of the outputs alone; {known}")
    return _told({"command": "export", **result}, lines)


def spectrum_command(
    *,
    options: NetworkOptions,
    data: Path | None = None,
    run: Path | None = None,
    out: Path | None = None,
    top: int | None = None,
    samples: int | None = None,
    kernel: Path | None = None,
    part: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Test whether a linear model suits a task: the kernel's spectrum, the labels in it, and a verdict.

    Args:
        data: The data: an image folder with one folder per class, an ``.npz`` archive or a table.
        run: The folder of a finished run to look at; then no data are named, and model is its factory, where
            the run's own is not here or not to be run.
        out: The folder for the report; spectrum in the run's folder by default.
        top: Leading directions of the kernel to speak of; 50 by default, or a fifth of all if fewer.
        samples: Training samples to take the spectrum on, drawn at random; by default all, or as many as the
            memory and a few seconds allow where the kernel is not there already.
        kernel: A file for the kernel, NAME.npy, which stays. What parts or an earlier call have made of it is
            taken; the kernel of other weights, data or settings is refused.
        part: Compute one part of the kernel into that file, and nothing else: 3/64 is the fourth of 64, such
            as a task of an array job. Afterwards the same command without --part, and with --out, goes on.
        trust: Whether to run code that a run of another user names.
    """
    from linnet.app.runs.spectrum import check_place, from_data, from_run, made_part, report
    from linnet.params import integer, optional

    if (run is None) == (data is None):
        raise InputError(
            f"--data and --run are {'both' if run else 'not'} given",
            expected="a finished run, or a network with data",
            remedy="linnet spectrum --run RUN, or linnet spectrum --model M --data D --out FOLDER",
        )
    optional(integer, "top", top)
    optional(integer, "samples", samples, least=2)
    task = None if data is None else TaskOptions(**vars(options), data=data)
    if part is not None:
        return _told(*made_part(task, kernel, part))
    if (run is None and out is None) or (kernel is not None and run is not None):
        raise InputError(
            "--out must be given where there is no --run, and no --kernel where there is one",
            expected="linnet spectrum --run RUN, or linnet spectrum --model M --data D --out FOLDER",
            remedy="linnet spectrum --help shows every option",
        )
    folder = out or Path(run or "") / "spectrum"
    check_place(folder, run)
    if task is not None:
        return _told(*report(from_data(task, kernel), folder, top, samples, options.memory))
    assert run is not None
    given = RunOptions(
        run=run, model=options.model, memory=options.memory, device=options.device, trust=trust
    )
    return _told(*report(from_run(given), folder, top, samples, options.memory))


def check_command(*, options: TaskOptions, batch: int = 8) -> dict[str, Any]:
    """Check that a network and its data are supported, and estimate what a fit will cost.

    The network is the one that ``linnet adapt`` makes of it, with a new head in place of its last layer.
    --verbose prints every parameter with its treatment.

    Args:
        batch: Samples to try the network on.
    """
    if options.data.suffix == TEXTS:
        from linnet.app.runs import adapter

        return _told(*adapter.check(options))
    from linnet.app.runs.adaptation import check_task

    return _told(*check_task(options, batch))


def doctor_command(*, seconds: float = 0.5) -> dict[str, Any]:
    """Report what is installed, what works on this machine, and why the rest does not.

    Args:
        seconds: Time spent on measuring the speed of matrix products, on each device.
    """
    from linnet.machine import survey
    from linnet.memory import format_bytes

    found = {"linnet": __version__, **survey(seconds)}
    packages = ", ".join(f"{name} {version or 'MISSING'}" for name, version in found["packages"].items())
    lines = [
        f"linnet {found['linnet']}, Python {found['python']}, {found['platform']}",
        f"packages:    {packages}",
    ]
    if found["namesake"]:
        lines.append(f"another project's linnet is installed beside this one: {_pasted(found['namesake'])}")
    for device in found["devices"]:
        threads = f", {found['threads']} threads" if device["device"] == "cpu" else ""
        lines.append(
            f"{device['device'] + ':':<13}{device['name']}{threads}, "
            f"{format_bytes(device['available_bytes'])} free, "
            f"{device['sgemm_gflops']:.0f} GFLOP/s in float32 products"
        )
    lines.append("optional packages:")
    for name, package in found["optional"].items():
        said = f"{package['version']}, for {package['use']}"
        if not package["works"]:
            said = f"{package['reason']} (for {package['use']}: {_pasted(package['remedy'])})"
        lines.append(f"  {name:<16}{said}")
    lines.append("directional derivatives, by kind of layer:")
    for name, probe in found["derivatives"].items():
        lines.append(f"  {name:<16}{probe['path'] or 'NONE'}{': ' * bool(probe['reason'])}{probe['reason']}")
    fine = "everything that linnet needs works here"
    return _told(found, [*lines, fine if found["ok"] else "linnet will not work as it should here"])


def _pasted(text: str) -> str:
    """A text in which commands stay on one line."""
    return re.sub("pip [^,]+", lambda match: kept(match[0]), text)
