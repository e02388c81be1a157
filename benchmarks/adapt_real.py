"""The time of ``linnet.adapt`` on networks of real size, each problem in a process of its own.

    python benchmarks/adapt_real.py --data-dir DATA
    python benchmarks/adapt_real.py --only resnet20 bert

A problem is the fit and the predictions for the test samples with their variances; the network is loaded
before. The first ones are the call as it is without arguments, the others have half of the kernel from the
derivatives of the lower layers. Beside the seconds stand the peak of the process's memory,
and the floor by operation count: one forward pass of every sample and a backward pass of each random head, at
the rate of float32 matrix products in the same process. Products of pairs of samples are not in the floor.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import Row, parser, publish, setup, sgemm_rate
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import linnet
from linnet.errors import DataError
from linnet.nested.adapt import HEADS
from linnet.tangent.batch import Inputs, take

Problem = tuple[nn.Module, Inputs, Tensor, Inputs]  # network, training samples and labels, test samples


def lite(data_dir: str | None) -> Problem:
    """EfficientNet-lite0 on images of 96 pixels."""
    from eurosat import find_data_dir

    from linnet.app.models import load_model

    folder = find_data_dir(data_dir, require=["weights"]) / "weights"
    return (load_model(f"{folder / 'nets_more.py'}:efficientnet_lite0"), *images(200, 500, 96, 10))


def sentences(_: str | None) -> Problem:
    """A sentence encoder of the size of MiniLM-L6 with random weights on 32 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    ids = torch.randint(1, 30_000, (1000, 32), generator=torch.Generator().manual_seed(0))
    every: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = BertModel(config, add_pooling_layer=False).eval()
    return model, take(every, slice(0, 500)), torch.arange(500) % 4, take(every, slice(500, 1000))


def many(_: str | None) -> Problem:
    """ResNet-20 on 4,000 images."""
    found = resnet20(_)
    return (found[0], *images(4000, 500, 32, 10))


def large(_: str | None) -> Problem:
    """ViT-B/16 with random weights on 200 images of 224 pixels."""
    return (vit(_)[0], *images(200, 100, 224, 10))


def images(train: int, test: int, side: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random images: the time depends on their size alone."""
    generator = torch.Generator().manual_seed(0)
    x, xt = (torch.randn(n, 3, side, side, generator=generator) for n in (train, test))
    return x, torch.arange(train) % classes, xt


def resnet20(_: str | None) -> Problem:
    """ResNet-20 on EuroSAT."""
    from eurosat import task

    found = task(100, 500)
    return found.model, found.x, found.y, found.test_x


def mobilenet(train: int, test: int, side: int) -> Callable[[str | None], Problem]:
    """MobileNetV2 on images of a size."""

    def made(data_dir: str | None) -> Problem:
        from eurosat import find_data_dir

        from linnet.app.models import load_model

        folder = find_data_dir(data_dir, require=["weights"]) / "weights"
        weights = folder / "mobilenetv2_1.0_224_imagenet_tf2ptq_folded.npz"
        model = load_model(f"{folder / 'nets.py'}:MobileNetV2Folded", weights=weights)
        return (model, *images(train, test, side, 2))

    return made


def bert(_: str | None) -> Problem:
    """BERT-base with random weights on 32 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig()).eval()
    ids = torch.randint(1, 30_000, (70, 32), generator=torch.Generator().manual_seed(0))
    every: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model, take(every, slice(0, 50)), torch.arange(50) % 2, take(every, slice(50, 70))


def resnet50(_: str | None) -> Problem:
    """ResNet-50 with random weights at 224 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return (Logits(ResNetForImageClassification(ResNetConfig()).eval()), *images(20, 10, 224, 2))


def vit(_: str | None) -> Problem:
    """ViT-B/16 with random weights at 224 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    return (Logits(ViTForImageClassification(ViTConfig()).eval()), *images(20, 10, 224, 2))


class Logits(nn.Module):
    """A classifier of images that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) to logits."""
        found: Tensor = self.model(x).logits
        return found


# Name: the problem, the budget, the most seconds that a user should wait.
PROBLEMS: dict[str, tuple[Callable[[str | None], Problem], str | None, int]] = {
    "lite0": (lite, None, 90),
    "minilm": (sentences, None, 60),
    "resnet20-4000": (many, None, 60),
    "vit-200": (large, None, 120),
    "resnet20": (resnet20, None, 60),
    "mobilenet-96": (mobilenet(40, 140, 96), None, 60),
    "mobilenet-160": (mobilenet(200, 200, 160), None, 360),
    "bert": (bert, "3GB", 240),
    "resnet50": (resnet50, "2GB", 300),
    "vit": (vit, "3GB", 600),
}
PLAIN = ("lite0", "minilm", "resnet20-4000", "vit-200")  # called without arguments
TITLES = {
    "lite0": "EfficientNet-lite0, 96 px, 200 training and 500 test images, as it is",
    "minilm": "BERT of 6 layers and width 384, 32 tokens, 500 and 500, as it is",
    "resnet20-4000": "ResNet-20, 32 px, 4,000 and 500, as it is",
    "vit-200": "ViT-B/16, 224 px, 200 and 100, as it is",
    "resnet20": "ResNet-20, 32 px, 100 training and 500 test images",
    "mobilenet-96": "MobileNetV2, 96 px, 40 and 140",
    "mobilenet-160": "MobileNetV2, 160 px, 200 and 200",
    "bert": "BERT-base, 32 tokens, 50 and 20, 3 GB",
    "resnet50": "ResNet-50, 224 px, 20 and 10, 2 GB",
    "vit": "ViT-B/16, 224 px, 20 and 10, 3 GB",
}


def measured(name: str, data_dir: str | None) -> dict[str, Any]:
    """One problem, in this process."""
    make, memory, _ = PROBLEMS[name]
    model, x, y, xt = make(data_dir)
    one = take(x, slice(0, 1))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**one) if isinstance(one, dict) else model(one)
    rate = sgemm_rate(2048, 3)
    samples = len(y) + len(xt["input_ids"] if isinstance(xt, dict) else xt)
    passes = 1 if name in PLAIN else 1 + 2 * HEADS
    floor = samples * counter.get_total_flops() * passes / rate
    begin, used = time.perf_counter(), time.process_time()
    weight = None if name in PLAIN else 0.5  # random images would take no derivatives
    fit = linnet.adapt(model, (x, y), weight=weight, memory=memory)
    fitted = time.perf_counter() - begin
    found = fit.predictive(xt)
    assert bool(found.covariance.isfinite().all())
    return {
        "fit": fitted,
        "seconds": time.perf_counter() - begin,
        "cpu": time.process_time() - used,
        "floor": floor,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run the problems one after the other."""
    arguments = parser(__doc__ or "", repeats=1)
    arguments.add_argument("--data-dir", default=None, help="folder of the data sets and weights")
    arguments.add_argument("--only", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    arguments.add_argument("--inside", action="store_true", help="print one problem's numbers as JSON")
    options = arguments.parse_args()
    setup(options.threads)
    if options.inside:
        try:
            print(json.dumps(measured(options.only[0], options.data_dir)))
        except (DataError, ModuleNotFoundError) as missing:
            print(json.dumps({"missing": str(missing)}))
        return
    rows, details = [], {}
    for name in options.only:
        words = [sys.executable, __file__, "--inside", "--only", name, "--threads", str(options.threads)]
        words += ["--data-dir", options.data_dir] if options.data_dir else []
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        if "missing" in found:
            print(f"{TITLES[name]}: skipped: {found['missing']}", flush=True)
            continue
        details[name] = found
        note = (
            f"fit {found['fit']:.0f} s, CPU {found['cpu']:.0f} s, peak {found['peak'] / 1e9:.1f} GB, "
            f"{found['seconds'] / found['floor']:.1f} times the floor of {found['floor']:.0f} s"
        )
        rows.append(Row(TITLES[name], found["seconds"], found["seconds"], "<=", PROBLEMS[name][2], note))
        print(TITLES[name], note, file=sys.stderr, flush=True)
    publish("adapt on networks of real size", rows, options.json, problems=details)


if __name__ == "__main__":
    main()
