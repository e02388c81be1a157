"""Malaria incidence on a map (Maddox et al. 2021, supplement E.2): a loader that waits for its raster.

The paper trains a heteroscedastic network (2-500-500-2, tanh) on 2000 points of the Malaria Global Atlas'
map of Nigeria for 2012 and adapts it to the maps of later years. That raster cannot be had here.
``--raster`` takes it: the atlas' "Plasmodium falciparum incidence" (or parasite rate) of a year, cut to
Nigeria (longitude 2.6 to 14.7, latitude 4.2 to 13.9), as GeoTIFF (``.tif``, read with Pillow), or as
``.npz`` with ``values`` (rows, columns), nan where there are no data, ``longitude`` (columns,) and
``latitude`` (rows,). Give two: the year trained on and the year adapted to. Without them the script says
what it wants and ends.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import linnet
from experiments.study import Study, parser
from experiments.tables import markdown, with_error
from linnet.errors import DataError
from linnet.likelihoods import HeteroscedasticGaussian

WANTED = (
    "--raster needs two maps of the Malaria Atlas Project (malariaatlas.org): Plasmodium falciparum "
    "incidence of Nigeria for 2012 and for a later year, as .tif, or as .npz with values, longitude "
    "and latitude."
)
PIXEL_SCALE, TIE_POINT, NO_DATA = 33550, 33922, 42113  # tags of GeoTIFF


@dataclass(frozen=True)
class Raster:
    """The points of a map that hold data.

    Args:
        place: Longitude and latitude in degrees, (N, 2).
        value: (N, 1).
    """

    place: Tensor
    value: Tensor


def read_raster(path: str | Path) -> Raster:
    """Read a map.

    Args:
        path: A .npz or .tif file.

    Returns:
        Its points.

    Raises:
        DataError: If the file is missing or of another form, or holds no data.
    """
    file = Path(path)
    if not file.exists():
        raise DataError(f"{file} does not exist", expected="a raster", remedy=WANTED)
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as stored:
            missing = {"values", "longitude", "latitude"} - set(stored)
            if missing:
                raise DataError(f"{file} lacks {', '.join(sorted(missing))}", "all three", WANTED)
            values, longitude, latitude = (stored[k] for k in ("values", "longitude", "latitude"))
    elif file.suffix in (".tif", ".tiff"):
        values, longitude, latitude = _from_tiff(file)
    else:
        raise DataError(f"{file} is not a raster this reads", expected=".tif or .npz", remedy=WANTED)
    if values.shape != (len(latitude), len(longitude)):
        raise DataError(
            f"{file}: values {values.shape} for {len(latitude)} rows and {len(longitude)} columns",
            expected="one value for each",
            remedy="check the order of the axes",
        )
    rows, columns = np.nonzero(np.isfinite(values))
    if not len(rows):
        raise DataError(f"{file} holds no data", expected="finite values", remedy="check the file")
    place = np.stack([longitude[columns], latitude[rows]], 1).astype(np.float32)
    return Raster(
        torch.from_numpy(place), torch.from_numpy(values[rows, columns].astype(np.float32))[:, None]
    )


def _from_tiff(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, and the centers of columns and rows from the tags of a GeoTIFF."""
    from PIL import Image

    with Image.open(file) as image:
        tags = image.tag_v2  # type: ignore[attr-defined]
        values = np.array(image, dtype=np.float64)
        if PIXEL_SCALE not in tags or TIE_POINT not in tags:
            raise DataError(f"{file} says nothing of where it lies", "a GeoTIFF with pixel scale", WANTED)
        (wide, high), tie = tags[PIXEL_SCALE][:2], tags[TIE_POINT]
        nothing = float(str(tags[NO_DATA]).strip("\x00 ")) if NO_DATA in tags else math.nan
    values[values == nothing] = math.nan
    longitude = tie[3] + (np.arange(values.shape[1]) - tie[0] + 0.5) * wide
    latitude = tie[4] - (np.arange(values.shape[0]) - tie[1] + 0.5) * high
    return values, longitude, latitude


def network() -> nn.Sequential:
    """2-500-500-2 with tanh."""
    return nn.Sequential(nn.Linear(2, 500), nn.Tanh(), nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 2))


def drawn(raster: Raster, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random points of a map."""
    index = torch.randperm(len(raster.place), generator=torch.Generator().manual_seed(seed))[:n]
    return raster.place[index], raster.value[index]


def trained(data: tuple[Tensor, Tensor], epochs: int, seed: int) -> nn.Module:
    """SGD with momentum on batches of 200, the rate from 10⁻³ a tenth every fifth of the epochs."""
    torch.manual_seed(seed)
    model, likelihood = network(), HeteroscedasticGaussian()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.1 ** (5 * epoch // epochs)
        for index in torch.randperm(len(data[0])).split(200):
            loss = likelihood.nll(model(data[0][index]), data[1][index]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def compared(maps: list[Raster], given: argparse.Namespace, seed: int, points: int) -> dict[str, Any]:
    """RMSE and log density on the second map: the network as it is, and its tangent process."""
    first, second = (drawn(raster, given.points_first, seed) for raster in maps)
    center, spread = first[0].mean(0), first[0].std(0)
    scale = first[1].std()
    scaled = [((x - center) / spread, y / scale) for x, y in (first, second)]
    model, likelihood = trained(scaled[0], given.epochs, seed), HeteroscedasticGaussian()
    few = tuple(t[:points] for t in scaled[1])
    x, y = (t[points : points + given.held_out] for t in scaled[1])
    with torch.no_grad():
        f = model(x)
        found = {"network": _scores(likelihood.mean(f), likelihood.variance(f), y)}
    gp = linnet.TangentGP(model, likelihood).fit(*few).tune()
    noisy = gp.predictive(x).with_noise()
    found["tangent process"] = _scores(noisy.mean, noisy.variance, y)
    return {f"{name}, {key}": value for name, pair in found.items() for key, value in pair.items()}


def _scores(mean: Tensor, variance: Tensor, y: Tensor) -> dict[str, float]:
    """In units of the first map's standard deviation."""
    variance = variance.double().clamp_min(1e-9)
    density = -0.5 * ((y - mean).double().square() / variance + (2 * math.pi * variance).log())
    return {"rmse": float((y - mean).square().mean().sqrt()), "density": float(density.mean())}


def main(arguments: list[str] | None = None) -> None:
    """Run the study, if there are maps."""
    options = parser(__doc__ or "", seeds=3)
    options.add_argument("--raster", nargs=2, default=None, help="maps of the first and of the second year")
    options.add_argument("--points-first", type=int, default=2000)
    options.add_argument("--points", type=int, nargs="+", default=[50, 200, 500])
    options.add_argument("--held-out", type=int, default=1000)
    options.add_argument("--epochs", type=int, default=500)
    given = options.parse_args(arguments)
    if given.raster is None:
        print(f"Nothing was run. {WANTED}")
        return
    study, maps = Study("fast_adaptation/malaria", given), [read_raster(path) for path in given.raster]
    names = [Path(path).name for path in given.raster]
    cells = [
        study.cell(
            {"points": n, "seed": seed, "epochs": given.epochs, "rasters": names},
            lambda n=n, seed=seed: compared(maps, given, seed, n),
        )
        for n in given.points for seed in study.seeds
    ]  # fmt: skip
    keys = [f"{name}, {key}" for name in ("network", "tangent process") for key in ("rmse", "density")]
    rows = [
        [n, *(with_error([c[k] for c in cells if c["points"] == n], 3) for k in keys)] for n in given.points
    ]
    study.publish(markdown(["points", *keys], rows), cells)


if __name__ == "__main__":
    main()
