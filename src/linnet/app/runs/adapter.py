"""Runs on texts: the adapter of a language model, fitted to JSON lines, asked, and changed.

A folder holds ``linear-fit.safetensors``, the solved fit; ``samples.safetensors``, the texts; and
``run.json``, which names the network. Its weights stay where they are; the fit knows them by their hash.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.app.options import TEXTS, AdaptOptions, RunOptions, TaskOptions, listed
from linnet.app.runs.adaptation import Stages, seconds_each
from linnet.app.runs.changes import unused
from linnet.app.runs.folder import ADAPTER, Origin, check_files, read_record, understood, write_run
from linnet.app.runs.place import RECORD, check_file, check_free, check_out, clear_run, leave, writing
from linnet.app.runs.queries import TABLES, write_rows
from linnet.app.runs.results import EQUAL, compared
from linnet.app.runs.samples import LISTED, find_samples
from linnet.app.runs.trust import check_run, remember_run
from linnet.app.terminal import kept
from linnet.errors import DataError, FileFormatError, InputError, LinnetError, ModelError, NumericalError
from linnet.files import load as load_tree
from linnet.files import read_json, require_file, save, write_json
from linnet.fitting.fit import fit as fit_linear
from linnet.fitting.position_fit import PositionFit, position_problem
from linnet.integrations.language import language_model
from linnet.integrations.text import PAIRS, RECORDS, tokenized, unnamed
from linnet.machine import find_device
from linnet.memory import format_bytes
from linnet.params import instance, integer, number
from linnet.progress import waiting
from linnet.report.numbers import duration
from linnet.saved import load
from linnet.tangent.batch import IGNORED, MASK
from linnet.tangent.data import Data
from linnet.tangent.functional import tensors_by_name
from linnet.tangent.linearized import linearize
from linnet.tree import hash_tensors, tensors_in

Told = tuple[dict[str, Any], list[str]]  # a result, and lines for people
RIDGES = (10.0, 1.0, 0.1, 0.01, 0.001)  # tried from the largest on, as long as the next one is better
AFFORDABLE = 100  # texts on which the ridge is chosen, and that are held out: that takes ten fits or more
TIMED = 8  # texts on which a product is timed
FEW, PARTS = 20, 10  # texts that are each held out alone; parts of more that are held out together
ALONE = 0.1  # the ridge of a single text
GIVEN = "as given"  # why the ridge is what it is
_TAKEN = ("model", "model_args", "data", "params", "ridge", "memory", "device", "seed")
_FILES = ("linear-fit", "samples")
_WIDE = 72  # characters of a text in a line
_FORM = f"a text, a list of a question and its answer, or {RECORDS.replace('records', 'a record')}"


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts with their names."""

    ids: tuple[str, ...]
    records: tuple[Any, ...]  # as `tokenized` takes them

    def take(self, places: Sequence[int]) -> Texts:
        """Some of them."""
        return Texts(tuple(self.ids[i] for i in places), tuple(self.records[i] for i in places))


@dataclass(frozen=True, eq=False)
class AdapterRun:
    """A fitted adapter with what it was made of."""

    origin: Origin  # the network by name, and the settings of a fresh adapter
    seed: int  # of the fresh adapter
    network: nn.Module  # with the adapter
    told: str  # both in words
    tokenizer: Any
    fit: PositionFit
    texts: Texts
    chosen: str  # why this ridge

    def batch(self, texts: Texts) -> dict[str, Tensor]:
        """Texts as the network takes them."""
        return _batch(texts, self.tokenizer)


# Networks and texts


def _built(spec: str, arguments: dict[str, Any], seed: int) -> tuple[nn.Module, Any, str]:
    """The network with its adapter, the tokenizer, and both in words."""
    source, _, name = spec.partition(":")
    if source != "hf" or not name:
        raise ModelError(
            f"model is {spec!r}, and the data are texts",
            expected="hf:FOLDER with a causal language model and its tokenizer, or with an adapter of peft",
            remedy="write both there with save_pretrained(FOLDER)",
        )
    with waiting("loading the network"):
        return language_model(name, arguments, seed)


def read_texts(path: Path, tokenizer: Any, part: str) -> Texts:
    """The texts of a file of JSON lines, each of which the tokenizer can read."""
    require_file(path, "data")
    if path.suffix != TEXTS:
        raise InputError(f"data is {path}", f"texts, a file that ends in {TEXTS}", "write a record a line")
    found: dict[str, Any] = {}
    content = path.read_bytes()
    if content.lstrip()[:1] == b"[" and len(content.lstrip().partition(b"\n")[0].strip()) == 1:
        raise DataError(f"{path} is one JSON list", _FORM, "write each of its records on a line of its own")
    for row, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        with _on_line(path, row, line):
            record = json.loads(line.decode("utf-8-sig"))
            name = record.get("id") if isinstance(record, dict) else None
            name = f"{part}/{len(found)}" if name is None else str(name)
            if name in found:
                raise DataError(f"its id {name!r} is that of an earlier line", "an id for each", "change one")
            found[name] = _as_example(record)
            _batch(Texts((name,), (found[name],)), tokenizer)
    if not found:
        raise DataError(f"{path} has no texts", f"a line for each: {_FORM}", "check how it was written")
    return Texts(tuple(found), tuple(found.values()))


@contextmanager
def _on_line(path: Path, number: int, line: bytes) -> Iterator[None]:
    """Say which line of a file is wrong, and what stands there."""
    try:
        yield
    except Exception as error:  # a tokenizer's own have no common type
        said = error.what if isinstance(error, LinnetError) else f"{type(error).__name__}: {error}"
        said = "it is not encoded in UTF-8" if isinstance(error, UnicodeDecodeError) else said
        expected = error.expected if isinstance(error, LinnetError) else _FORM
        remedy = (error.remedy if isinstance(error, LinnetError) else None) or "correct the line"
        shown = _shown(line.decode("utf-8", "replace"))
        what = f"{path}, line {number}, {shown}: {said.replace('examples[0]', 'it')}"
        raise DataError(what, expected, remedy) from error


def _as_example(record: Any) -> Any:
    """A line as `tokenized` takes it, entries of a record without their names."""
    if isinstance(record, list) and len(record) == 2 and all(isinstance(one, str) for one in record):
        return tuple(record)
    if not isinstance(record, dict):
        return record
    found = unnamed(record)
    if found is None:
        given = {name for name, value in record.items() if value is not None}
        names = next((pair for pair in PAIRS if given.intersection(pair)), PAIRS[0])
        missing = next(name for name in names if name not in given)
        raise DataError(f"it has no {missing!r}", _FORM, f'add "{missing}", or name the entries so')
    return found


def _batch(texts: Texts, tokenizer: Any) -> dict[str, Tensor]:
    """Texts as a batch in which each has a token to learn."""
    batch = tokenized(texts.records, tokenizer)
    if not bool((_tokens(batch["labels"]) > 0).all()):
        raise DataError("it has no token behind another", "two tokens at least", "write a longer text")
    width, most = batch["labels"].shape[1], getattr(tokenizer, "model_max_length", None)
    if most is not None and width > most:
        raise DataError(f"it has {width} tokens", f"at most the network's {most}", "cut it into parts")
    return batch


def _tokens(labels: Tensor) -> Tensor:
    """How many tokens are learned of each text: the first has nothing before it."""
    return (labels[:, 1:] != IGNORED).sum(1)


def _said(example: Any) -> str:
    """A text as people read it."""
    parts = example if isinstance(example, tuple) else (example,)
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return " / ".join(f"{one['role']}: {one['content']}" for part in parts for one in part)


def _shown(text: str) -> str:
    """The beginning of a text, in one line that no terminal takes for a command."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.shorten(plain, _WIDE, placeholder=" ...")


# Fits


def adapt(options: AdaptOptions, out: Path, quick: bool, overwrite: bool) -> Told:
    """Fit an adapter to texts: the result, and lines for people."""
    leave()
    spec, arguments = _checked(options, quick), dict(options.model_args or {})
    stages, device = Stages(), find_device(options.device)
    with stages.measure("loading"):
        network, tokenizer, told = _built(spec, arguments, options.seed)
        texts = read_texts(options.data, tokenizer, "train")
        network = network.to(device)
    origin = Origin(spec, arguments)
    run, held = _interrupted(out, options, origin, texts), None
    if run is None:
        with stages.measure("fit"), waiting("the fit"):
            fit, chosen, held = _fitted(network, _batch(texts, tokenizer), options)
        run = AdapterRun(origin, options.seed, network, told, tokenizer, fit, texts, chosen)
        if overwrite:
            clear_run(out)
        _save(out, run)
    (before, after), batch = _training(run.fit), run.batch(texts)
    counts, losses = _tokens(batch["labels"]), {"before": before, "after": after}
    why = f"{AFFORDABLE} texts at most are held out"
    if run.fit.n <= AFFORDABLE:
        with stages.measure("refits"), waiting("refits"):
            try:
                losses["held_out"] = _held_out(run.fit, run.seed) if held is None else held
            except NumericalError as error:  # of the refits alone: the fit itself has been solved
                why = f"not known of texts held out: {error.what}"
    rows = rows_of(texts, batch, **losses)
    mean = {name: float(value.sum() / counts.sum()) for name, value in losses.items()}
    if "held_out" in mean:
        why = f"{mean['held_out']:.3f} by fits without {_part(run.fit.n)}"
    result: dict[str, Any] = {
        "command": "adapt", "train": len(texts.ids), "tokens": int(counts.sum()), "network": told,
        "loss_per_token": mean, "ridge": run.fit.ridge, "ridge_reason": run.chosen, "texts": rows,
        "seconds": stages.seconds, "fit": run.fit.summary(), "out": str(out),
    }  # fmt: skip
    _write(out, result)
    lines = [
        f"texts: {len(texts.ids)}, with {int(counts.sum())} tokens to learn",
        f"network: {told}; {result['fit']['parameters']:,} weights take part",
        f"loss per token: {mean['before']:.3f} nats before, {mean['after']:.3f} after, {why}",
        f"ridge: {run.fit.ridge:g}, {run.chosen}",
        "time: " + ", ".join(f"{what} {duration(taken)}" for what, taken in stages.seconds.items()),
    ]
    return result, [*lines, *_ending(out, result)]


def _checked(options: AdaptOptions, quick: bool) -> str:
    """The network by a name that means the same in every folder; what has no meaning here is refused."""
    given = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in _TAKEN}
    plain = {one.name: one.default for one in fields(options)}
    for name, value in {**given, "quick": quick}.items():
        if value != plain.get(name, False):
            raise _no_use(name, value)
    if options.params not in (None, "lora"):
        raise InputError(f"params is {options.params!r}", "lora, where the data are texts", "leave it out")
    models = listed(options.model)
    if len(models) != 1:
        raise InputError("--model must be given once", "hf:FOLDER with a language model", "name one network")
    if options.ridge not in ("auto", "loo"):
        number("ridge", options.ridge, above=0)
    integer("seed", options.seed, least=0)
    return _absolute(models[0])


def _absolute(spec: str) -> str:
    """The name of a folder in full."""
    source, _, name = spec.partition(":")
    return f"{source}:{Path(name).resolve()}" if source == "hf" and name and Path(name).is_dir() else spec


def _no_use(name: str, value: Any) -> InputError:
    """The error of an option that has no meaning for texts."""
    return InputError(
        f"{name} is {value!r}, which has no meaning for texts",
        expected="images or rows with it",
        remedy=f"leave {name}= out",
    )


def _interrupted(out: Path, options: AdaptOptions, origin: Origin, texts: Texts) -> AdapterRun | None:
    """The fit of a run that was interrupted after it was solved."""
    if not is_adapter(out) or (out / "result.json").exists():
        return None
    try:
        run = opened(RunOptions(run=out, device=options.device, memory=options.memory))
    except LinnetError:
        return None
    given = options.ridge not in ("auto", "loo")
    ridge = run.fit.ridge == options.ridge if given else run.chosen != GIVEN
    same = run.origin == origin and run.seed == options.seed and vars(run.texts) == vars(texts)
    return run if same and ridge else None


def _fitted(
    network: nn.Module, batch: dict[str, Tensor], options: AdaptOptions
) -> tuple[PositionFit, str, Tensor | None]:
    """The fit, why it has this ridge, and losses of texts held out where the choice has taken them."""
    if options.ridge not in ("auto", "loo"):
        return _solved(network, batch, float(options.ridge), options.memory), GIVEN, None
    count = len(batch["labels"])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(options.seed))
    some = {name: part[order[:AFFORDABLE].sort().values] for name, part in batch.items()}
    if count == 1:
        return _solved(network, batch, ALONE, options.memory), "as one text leaves none to choose it by", None
    tokens, tried, best = int(_tokens(some["labels"]).sum()), dict[float, float](), None
    held: Tensor | None = None
    for ridge in RIDGES:
        fit = _solved(network, some, ridge, options.memory)
        try:
            losses = _held_out(fit, options.seed)
        except NumericalError:
            if best is None:
                raise
            break
        tried[ridge] = float(losses.sum()) / tokens
        if tried[ridge] > min(tried.values()):
            break
        best, held = fit, losses
    told = ", ".join(f"{ridge:g} ({loss:.3f})" for ridge, loss in tried.items())
    whose = "" if count <= AFFORDABLE else f" of {AFFORDABLE} texts"
    why = f"the least loss per token{whose} by fits without {_part(len(some['labels']))}, of {told}"
    assert best is not None
    if best.ridge == RIDGES[-1]:
        why += ", the smallest that is tried"
    return (_solved(network, batch, best.ridge, options.memory), why, None) if whose else (best, why, held)


def _part(count: int) -> str:
    """What the fits were without that each text is tested on."""
    return "each text" if count <= FEW else "a tenth of the texts each"


def _held_out(fit: PositionFit, seed: int) -> Tensor:
    """Losses of texts by fits without them."""
    return fit.held_out_losses(max(fit.n, 2) if fit.n <= FEW else PARTS, seed)


def _solved(
    network: nn.Module, batch: dict[str, Tensor], ridge: float, memory: str | int | None
) -> PositionFit:
    """The optimum."""
    lin = linearize(network, params="lora")
    found: Any = fit_linear(lin, batch, "cross-entropy", axis=-1, ridge=ridge, memory=memory)
    assert isinstance(found, PositionFit)
    return found


def _training(fit: PositionFit) -> tuple[Tensor, Tensor]:
    """Losses of the training texts, by the network as it was and by the fit."""
    problem = fit.system.problem
    return problem.losses(problem.base), problem.losses(problem.base + problem.push(fit.system.eta))


def rows_of(texts: Texts, batch: dict[str, Tensor], **losses: Tensor) -> list[dict[str, Any]]:
    """Texts as plain values, with their losses in nats."""
    columns = {"tokens": _tokens(batch["labels"]), **losses}
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    named = zip(texts.ids, map(_said, texts.records), values, strict=True)
    return [{"id": name, "text": text, **dict(zip(columns, row, strict=True))} for name, text, row in named]


def check(options: TaskOptions) -> Told:
    """Whether an adapter can be fitted to texts, what of them is kept, and how long a product takes."""
    given = AdaptOptions(**{one.name: getattr(options, one.name) for one in fields(options)})
    spec, device = _checked(given, False), find_device(options.device)
    network, tokenizer, told = _built(spec, dict(options.model_args or {}), options.seed)
    texts = read_texts(options.data, tokenizer, "train")
    batch, lin = _batch(texts, tokenizer), linearize(network.to(device), params="lora")
    few = {name: part[:TIMED] for name, part in batch.items()}
    x, y = Data.of(few, lin.function).pair
    problem = position_problem(lin.function, x, y, -1, options.memory)
    product, v = problem.hessian(problem.base), torch.ones(lin.space.dim, device=device)
    each = seconds_each(lambda _: product.mv(v).sum().item(), y)
    kept = problem.base.nbytes + sum(t.nbytes for t in tensors_in(problem.x))
    weights = sum(t.nbytes for t in tensors_by_name(network).values())
    n, tokens, width = len(texts.ids), int(_tokens(batch["labels"]).sum()), batch["input_ids"].shape[1]
    size, seconds = {"network": weights, "texts": kept * n // len(y)}, each * n
    result: dict[str, Any] = {
        "command": "check", "ok": True, "train": n, "tokens": tokens, "longest": width, "network": told,
        "parameters": lin.space.dim, "bytes": size, "seconds": {"product": seconds},
    }  # fmt: skip
    tries = len(RIDGES) * (1 + (n if n <= FEW else PARTS))
    return result, [
        "ready: linnet adapt takes this network and these texts",
        f"texts: {n}, with {tokens} tokens to learn, the longest of {width}",
        f"network: {told}; {lin.space.dim:,} weights take part",
        f"memory: {format_bytes(weights)} for the network, {format_bytes(size['texts'])} kept of the texts",
        f"time: about {duration(seconds)} for a product with the curvature; a fit takes tens to hundreds",
        f"without --ridge up to {tries} fits of at most {AFFORDABLE} texts choose it, each from the last",
    ]


# Folders


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a run on texts; whatever else is wrong with it is said when it is opened."""
    try:
        return ADAPTER in read_json(folder / RECORD, "run")
    except (LinnetError, TypeError):
        return False


def _save(out: Path, run: AdapterRun) -> None:
    """Write a run that is not evaluated yet."""
    (out / "result.json").unlink(missing_ok=True)

    def write() -> dict[str, Any]:
        run.fit.save(out)
        save(out, "samples", {"ids": run.texts.ids, "records": run.texts.records})
        own = {"seed": run.seed, "chosen": run.chosen, "tokens": _digest(run.batch(run.texts))}
        return {"origin": asdict(run.origin), ADAPTER: own}

    write_run(out, write, _FILES)


def _digest(batch: dict[str, Tensor]) -> str:
    """A hash of texts as tokens, by which another tokenizer is noticed."""
    return hash_tensors([ids[kept.bool()] for ids, kept in zip(batch["input_ids"], batch[MASK], strict=True)])


def _write(folder: Path, result: dict[str, Any]) -> None:
    """Write a result."""
    with writing(folder, wait=True):
        write_json(folder / "result.json", result)


def opened(options: RunOptions) -> AdapterRun:
    """Read the run that a command names."""
    device, folder = find_device(options.device), options.run
    check_free(folder)
    record = read_record(folder)
    with understood(folder):
        origin, own = Origin(**record["origin"]), record[ADAPTER]
        seed, chosen, tokens = integer("seed", own["seed"], least=0), str(own["chosen"]), str(own["tokens"])
        instance("spec", origin.spec, str, "a string")
        instance("arguments", origin.arguments, dict, "a dictionary")
        if set(record["files"]) != set(_FILES):
            raise ValueError("its files are others")
    check_files(folder, record)
    if not options.trust:
        check_run(folder, record, origin.spec, origin.arguments, named=options.model is not None)
    if options.model is not None:
        origin = replace(origin, spec=_absolute(options.model))
    place = Path(origin.spec.partition(":")[2])
    if place.is_absolute() and not place.is_dir():
        raise InputError(
            f"the network of {folder} is not at {place}", "its folder", "name it: --model hf:FOLDER"
        )
    samples = load_tree(folder / "samples.safetensors", "samples")
    network, tokenizer, told = _built(origin.spec, origin.arguments, seed)
    fit = load(folder / "linear-fit.safetensors", network.to(device))
    with understood(folder):
        texts = Texts(samples["ids"], samples["records"])
        for record in texts.records:
            _said(record)
    if not isinstance(fit, PositionFit) or not fit.n == len(texts.ids) == len(texts.records):
        raise FileFormatError(f"{folder} has a fit of other texts", "its own files", "restore it from a copy")
    if _digest(_batch(texts, tokenizer)) != tokens:
        raise FileFormatError(
            f"the tokenizer of {origin.spec} makes other tokens of the texts than when {folder} was fitted",
            expected="the tokenizer that was there",
            remedy="restore it, or fit again",
        )
    fit.memory = options.memory
    if options.trust:
        remember_run(folder)
    return AdapterRun(origin, seed, network, told, tokenizer, fit, texts, chosen)


def _ending(out: Path, result: dict[str, Any]) -> list[str]:
    """Remarks, and where the numbers are."""
    notes = result.get("fit", {}).get("warnings", ())
    return [*(f"note: {text}" for text in notes), f"numbers: {kept(out / 'result.json')}"]


# Questions


def predict(
    options: RunOptions, data: Path, out: Path | None, std: bool, coverage: float | None, overwrite: bool
) -> Told:
    """How probable answers are, as a table: the result, and lines for people."""
    table, folder = out or options.run / "predictions.csv", options.run / "predict"
    if coverage is not None:
        raise _no_use("coverage", coverage)
    if out is not None:
        check_file(out, TABLES, overwrite)
    run = opened(options)
    texts = read_texts(data, run.tokenizer, "test")
    batch = run.batch(texts)
    counts = _tokens(batch["labels"])
    with waiting("the predictions"):
        losses = run.fit.losses(batch)
        spread = {"std": run.fit.loss_variance(batch).sqrt()} if std else {}
    each = {"probability": (-losses).exp(), "token_probability": (-losses / counts.to(losses)).exp()}
    rows = rows_of(texts, batch, loss=losses, **each, **spread)
    write_rows(table, rows)
    result = {
        "command": "predict", "samples": len(rows), "tokens": int(counts.sum()),
        "loss_per_token": float(losses.sum() / counts.sum()), "texts": rows,
        "predictions": str(table), "out": str(folder),
    }  # fmt: skip
    _write(folder, result)
    lines = [f"texts: {len(rows)}, {kept(table)}; {result['loss_per_token']:.3f} nats per token"]
    for row in rows[:LISTED]:
        # a loss is above zero: of a larger spread first order says no more than that it is not known
        width = f"{row['std']:.3f}" if std and row["std"] < row["loss"] else "all of it"
        error = f" +- {width}" if std else ""
        said = f"{row['loss']:.3f}{error} nats, {row['probability']:.1%}"
        lines.append(_line(said, row["id"], row["text"]))
    return result, [*lines, *_ending(folder, result)]


def explain(
    options: RunOptions, data: Path | None, ids: list[str] | None, top: int, out: Path | None
) -> Told:
    """The training texts that make answers likelier and less likely: the result, and lines for people."""
    folder = out or options.run / "explain"
    check_out(folder, options.run)
    integer("top", top)
    if data is None and ids is None:
        raise InputError("neither --data nor --ids is given", "one of them", "name texts, as --ids train/3")
    run = opened(options)
    every = run.texts if data is None else read_texts(data, run.tokenizer, "test")
    kind = "training texts of the run" if data is None else f"texts in {data}"
    known = {} if data is None else {"training texts of the run": run.texts.ids}
    asked = every if ids is None else every.take(find_samples(ids, every.ids, kind, lambda: known))
    batch = run.batch(asked)
    with waiting("influence"):
        added = sides_of(run, batch, top)
    told, lines = rows_of(asked, batch, loss=run.fit.losses(batch)), []
    for row, sides in zip(told, added, strict=True):
        row |= sides
        lines.append(_line(f"{row['loss']:.3f} nats", row["id"], row["text"]))
        each = [(side, one) for side, rows in sides.items() for one in rows]
        lines += [_line(f"  {side:<5}{n['influence']:+9.3f}", n["id"], n["text"]) for side, n in each]
    result = {"command": "explain", "ids": list(asked.ids), "explanations": told, "out": str(folder)}
    _write(folder, result)
    unit = "influence: nats that a text adds to the log-probability of the answer"
    return result, [*lines, unit, *_ending(folder, result)]


def sides_of(run: AdapterRun, batch: dict[str, Tensor], top: int) -> list[dict[str, list[dict[str, Any]]]]:
    """For each text of a batch the training texts that raise its log-probability most, and that lower it."""
    trained, found = rows_of(run.texts, run.batch(run.texts)), []
    for added in (-run.fit.influence(batch)).T.tolist():
        order = sorted(range(len(added)), key=added.__getitem__)
        sides = {"up": [i for i in order[::-1][:top] if added[i] > 0],
                 "down": [i for i in order[:top] if added[i] < 0]}  # fmt: skip
        told = {side: [{**trained[i], "influence": added[i]} for i in rows] for side, rows in sides.items()}
        found.append(told)
    return found


def _line(said: str, name: str, text: str) -> str:
    """What is said of a text, its id and the text, for the terminal."""
    return f"{said}  {_shown(name)}  {_shown(text)}"


# Changes


def forget(options: RunOptions, ids: Sequence[str], out: Path, verify: bool, overwrite: bool) -> Told:
    """Forget training texts: the result, and lines for people."""
    run, start = opened(options), time.perf_counter()
    with waiting("forgetting"):
        after, gone = without(run, ids)
    return _changed("forget", run, after, gone, time.perf_counter() - start, out, verify, overwrite)


def without(run: AdapterRun, ids: Sequence[str]) -> tuple[AdapterRun, Texts]:
    """The run without some texts, and these."""
    places = find_samples(ids, run.texts.ids, "training texts")
    if len(places) == run.fit.n:
        raise InputError(f"ids names all {run.fit.n} texts", "at least one that stays", "leave some out")
    stay = [at for at in range(run.fit.n) if at not in set(places)]
    return replace(run, fit=run.fit.forget(places), texts=run.texts.take(stay)), run.texts.take(places)


def update(options: RunOptions, data: Path, out: Path, verify: bool, overwrite: bool, new_class: Any) -> Told:
    """Add training texts: the result, and lines for people."""
    if new_class:
        raise _no_use("new_class", new_class)
    run = opened(options)
    new = read_texts(data, run.tokenizer, "train")
    fresh = [at for at, record in enumerate(new.records) if record not in run.texts.records]
    known = len(new.records) - len(fresh)
    if not fresh:
        raise DataError(
            f"all {known} texts of {data} are training texts of the run already",
            expected="texts that the run was not trained on",
            remedy="give other texts",
        )
    new = new.take(fresh)
    start = time.perf_counter()
    with waiting("the update"):
        fit = run.fit.update(run.batch(new))
    seconds = time.perf_counter() - start
    new = replace(new, ids=unused(run.texts.ids, data.name, new.ids))
    both = Texts(run.texts.ids + new.ids, run.texts.records + new.records)
    told = _changed("update", run, replace(run, fit=fit, texts=both), new, seconds, out, verify, overwrite)
    if known:
        told[1].append(f"note: {known} texts of {data.name} are training texts already, and were left out")
    return told


def _changed(
    command: str, run: AdapterRun, after: AdapterRun, texts: Texts, seconds: float, out: Path, verify: bool,
    overwrite: bool,
) -> Told:  # fmt: skip
    """Write a run after a change, and what became of the texts that were taken out or in."""
    batch, every, refit = run.batch(texts), _training(after.fit)[1], {}
    if verify:
        start = time.perf_counter()
        with waiting("a fit from scratch"):
            anew = _solved(run.network, run.batch(after.texts), after.fit.ridge, run.fit.memory)
        difference = float((_training(anew)[1] - every).abs().max())
        refit = {"difference": difference, "equal": difference < EQUAL}
        refit["refit_seconds"] = time.perf_counter() - start
    counts, was, now = _tokens(batch["labels"]), run.fit.losses(batch), after.fit.losses(batch)
    mean = {name: float(loss.sum() / counts.sum()) for name, loss in (("before", was), ("after", now))}
    rows, summary = rows_of(texts, batch, before=was, after=now), after.fit.summary()
    result = {
        "command": command, "train_before": run.fit.n, "train": after.fit.n, "network": run.told,
        "loss_per_token": mean, "loss_per_training_token": float(every.sum()) / summary["positions"],
        "certificate": summary["certificate"], "verified": verify, **refit,
        "removed" if command == "forget" else "added": rows, "seconds": seconds, "fit": summary,
        "out": str(out),
    }  # fmt: skip
    if overwrite:
        clear_run(out)
    _save(out, after)
    _write(out, result)
    what, many = "forgotten" if command == "forget" else "added", "s" * (len(rows) != 1)
    lines = [
        f"{len(rows)} text{many} {what} in {duration(seconds)}; {after.fit.n} now",
        *(_line(f"  {r['before']:.3f} -> {r['after']:.3f} nats", r["id"], r["text"]) for r in rows[:LISTED]),
        f"loss per token of what was {what}: {mean['before']:.3f} nats before, {mean['after']:.3f} after; "
        f"of all training texts now: {result['loss_per_training_token']:.3f}",
        f"gradient relative to that at the start: {summary['certificate']:.1e}",
    ]
    if verify:
        lines.append(f"{compared(result)}: losses differ by {refit['difference']:.1e} nats at most")
    return result, [*lines, *_ending(out, result)]
