"""`linnet check`: the preflight of a network and data, and what a fit will cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from linnet.app.data import TaskData, check_images, read_task
from linnet.app.models import load_model
from linnet.app.options import TaskOptions
from linnet.app.runs.adaptation import TESTED, checked_features, ending, named_network, seconds_each
from linnet.app.runs.normalization import normalized
from linnet.app.runs.results import in_plain_spaces
from linnet.machine import find_device
from linnet.params import integer
from linnet.progress import is_verbose
from linnet.report.numbers import duration
from linnet.tangent.functional import Functional
from linnet.tangent.preflight import Preflight


@dataclass(frozen=True, eq=False)
class Checked:
    """What was found of a network and data."""

    report: Preflight  # of the network
    task: TaskData  # the data
    findings: tuple[str, ...]  # of the data
    seconds: (
        tuple[float, float] | None
    )  # predicted, of the fit and the test samples; None where it cannot run

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        report, task, seconds = self.report, self.task, self.seconds
        data = {
            "train": len(task.train), "test": len(task.test), "findings": list(self.findings),
            "classes": None if task.classes is None else list(task.classes),
        }  # fmt: skip
        known = None if seconds is None else {"fit": seconds[0], "test": seconds[1]}
        return {**report.to_dict(), "ok": report.ok, "data": data, "seconds": known}


def check_task(options: TaskOptions, batch: int) -> Checked:
    """Check a network on a few samples, and every file of the data by its header."""
    integer("batch", batch)
    device, task = find_device(options.device), read_task(options)
    check_images(task)
    sample = task.subset("train", range(min(batch, len(task.train))))
    if options.size is not None:  # of what a few samples take in their own size, the preflight tells
        replace(sample, test=sample.train).require_memory(options.memory)  # only these are decoded
    spec, arguments = named_network(options, task)
    old = load_model(spec, options.weights, arguments).to(device)
    sample = normalized(sample, old, options.mean == "auto")
    x = sample.tensors("train")[0].to(device)
    network = ending(old, task, x, options.output)
    module, report = checked_features(options, network, x)
    own = Functional(network).output_shape(x).numel()
    note = f"its head of {own} outputs is replaced by a new one, as linnet adapt does"
    # with too large a plan the finding says so; nothing could be computed
    fits = report.ok and report.memory.peak <= report.memory.budget
    report = replace(report, ok=fits, findings=(*report.findings, note))
    # The passes through the network decide, which grow with the samples; the products of pairs of samples
    # are left out.
    each = seconds_each(module.kernel, x) if fits else 0.0
    seconds = (each * len(task.train), TESTED * each * len(task.test)) if fits else None
    return Checked(report, task, sample.findings, seconds)


def print_check(found: Checked) -> list[str]:
    """For people: the answer, what to look at, and the time; all else with --verbose."""
    report, task = found.report, found.task
    kinds = "" if task.classes is None else f" of {len(task.classes)} classes"
    noun = "images" if task.image_mode else "samples"
    lines = ["ready: linnet adapt takes this network and these data" if report.ok else "NOT ready:"]
    lines += [f"  {one}" for one in (() if report.ok else report.findings)]
    lines += [f"data: {finding}" for finding in found.findings]
    lines.append(f"data: {len(task.train)} training and {len(task.test)} test {noun}{kinds}")
    if found.seconds is not None:
        fit, tests = (in_plain_spaces(duration, one) for one in found.seconds)
        lines.append(
            f"linnet adapt: about {fit} for the fit, {tests} for the test {noun} with their variances"
        )
    lines += [f"note: {one}" for one in (report.findings if report.ok else ())]
    if not is_verbose():
        total = f"{len(report.parameters)} parameters, {report.total:,} weights"
        return [*lines, f"{total}; --verbose lists them"]
    return [*lines, "", *str(report).splitlines()]
