"""The tasks and networks of the studies: those that choices were made on, and those kept for reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.adapt.encoders import (
    FirstToken,
    MeanToken,
    efficientnet_lite,
    minilm_l6,
    smollm,
    tokens,
)
from experiments.locate import find_data_dir
from experiments.sources import Images, images, pixels, pretrained
from linnet.tangent.batch import Inputs

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MEAN_ODD = ((0.498, 0.498, 0.498), (0.502, 0.502, 0.502))  # EfficientNet-lite's own normalization


@dataclass(frozen=True)
class Task:
    """A set of labeled images or texts.

    Args:
        name: What tables call it.
        file: The data set.
        coarse: Whether the 20 superclasses of CIFAR-100 are the classes.
        text: Whether they are texts.
    """

    name: str
    file: str
    coarse: bool = False
    text: bool = False


DEVELOPMENT = (
    Task("spoken digits", "spoken_digits_mel64"),
    Task("hand signs", "sign_digits_64"),
    Task("EuroSAT", "eurosat_1000_500"),
    Task("flowers 64", "flowers_64"),
    Task("Fashion-MNIST", "fashion_mnist"),
    Task("MNIST", "mnist"),
    Task("CIFAR-10", "cifar10_10k_5k"),
    Task("steel defects", "neu_steel_defects_80"),
    Task("notMNIST", "notmnist_test10k"),
    Task("CIFAR-100 superclasses", "cifar100_5k_2k", coarse=True),
    Task("Olivetti faces", "olivetti"),
    Task("rice leaves", "rice_leaf_96"),
    Task("blood cells", "wbc_80"),
    Task("scenes", "scenes12_80"),
    Task("hand-drawn shapes", "hand_shapes_70"),
    Task("chest X-rays", "chest_xray_96"),
    Task("flowers 160", "flowers_160"),
    Task("question types", "trec_questions", text=True),
    Task("film reviews", "sst2_sample", text=True),
    Task("news", "agnews_sample", text=True),
)
# Sets of many classes, made by ``collect.py`` too, on which choices were made as well.
MANY = (
    Task("spoken requests", "fresh/requests", text=True),
    Task("home requests", "fresh/home", text=True),
)
# Sets of texts on which the later choices for texts were made, likewise.
MORE = (
    Task("film grades", "fresh/sst5", text=True),
    Task("irony", "fresh/tweet_irony", text=True),
    Task("offensive tweets", "fresh/tweet_offensive", text=True),
    Task("hateful tweets", "fresh/tweet_hate", text=True),
)
# Sets that no choice has seen; ``collect.py`` makes their files. Two of its sets are left out, as their texts
# are those of news and film reviews.
REPORTED = (
    Task("food", "fresh/food"),
    Task("aerial views", "fresh/aerial"),
    Task("trash", "fresh/trash"),
    Task("textures", "fresh/textures"),
    Task("traffic signs", "fresh/traffic_signs"),
    Task("monkeys", "fresh/monkeys"),
    Task("groceries", "fresh/groceries"),
    Task("Kannada digits", "fresh/kannada_digits"),
    Task("product reviews", "fresh/customer_reviews", text=True),
    Task("subjectivity", "fresh/subjectivity", text=True),
    Task("opinions", "fresh/opinion_polarity", text=True),
    Task("bank requests", "fresh/banking77", text=True),
    Task("emotions", "fresh/tweet_emotion", text=True),
    Task("text messages", "fresh/sms_spam", text=True),
)


@dataclass(frozen=True)
class Network:
    """A pretrained network.

    Args:
        name: What tables call it.
        side: Height and width of its images here, or tokens of its texts.
        load: Makes the network from the data folder, with the normalization of its images or its tokenizer.
        late: Start of the names of the parameters that make up its last stage.
        text: Whether it takes texts.
    """

    name: str
    side: int
    load: Callable[[str | None], tuple[nn.Module, Any]]
    late: tuple[str, ...]
    text: bool = False


def _lite(data_dir: str | None) -> tuple[nn.Module, tuple[object, object]]:
    """EfficientNet-lite0."""
    return _more("efficientnet_lite0", data_dir), MEAN_ODD


def _vit(data_dir: str | None) -> tuple[nn.Module, tuple[object, object]]:
    """ViT-S/14 behind its class token."""
    return FirstToken(_more("dinov2_small", data_dir), 384), IMAGENET


def _minilm(data_dir: str | None) -> tuple[nn.Module, object]:
    """MiniLM with 3 layers behind the mean of its tokens."""
    return MeanToken(_more("minilm_l3", data_dir), 384), _more("minilm_tokenizer", data_dir)


def _lite_at_96(size: int, data_dir: str | None) -> tuple[nn.Module, tuple[object, object]]:
    """EfficientNet-lite0 to lite2 with batch normalization."""
    return efficientnet_lite(size), MEAN_ODD


def _minilm_l6(data_dir: str | None) -> tuple[nn.Module, object]:
    """The sentence encoder with 6 layers behind the mean of its tokens."""
    encoder, tokenizer = minilm_l6()
    return MeanToken(encoder, 384), tokenizer


def _smollm(data_dir: str | None) -> tuple[nn.Module, object]:
    """A decoder with 30 layers behind the mean of its tokens."""
    decoder, tokenizer = smollm()
    return MeanToken(decoder, 576), tokenizer


def _more(factory: str, data_dir: str | None) -> Any:
    """A network of the second file of definitions, or its tokenizer."""
    import importlib.util

    place = find_data_dir(data_dir, require=["weights"]) / "weights" / "nets_more.py"
    spec = importlib.util.spec_from_file_location("nets_more", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: nn.Module = getattr(module, factory)()
    return made


def _late(block: int) -> tuple[str, ...]:
    """The last stage of an EfficientNet-lite whose last block has this number."""
    return f"_blocks.{block}", "_conv_head", "_bn1"


NETWORKS = {
    "resnet20": Network("ResNet-20", 32, partial(pretrained, "resnet20"), ("layer3",)),
    "resnet56": Network("ResNet-56", 32, partial(pretrained, "resnet56"), ("layer3",)),
    "densenet": Network("DenseNet-BC", 32, partial(pretrained, "densenet"), ("block3", "bn1")),
    "mobilenet": Network("MobileNetV2", 64, partial(pretrained, "mobilenet"), ("blocks.16", "head")),
    "lite": Network("EfficientNet-lite0", 64, _lite, ("_blocks.15", "_conv_head", "_bn1")),
    "lite0": Network("EfficientNet-lite0 at 96", 96, partial(_lite_at_96, 0), _late(15)),
    "lite1": Network("EfficientNet-lite1 at 96", 96, partial(_lite_at_96, 1), _late(20)),
    "lite2": Network("EfficientNet-lite2 at 96", 96, partial(_lite_at_96, 2), _late(20)),
    "vit": Network("ViT-S/14", 70, _vit, ("encoder.encoder.layer.11", "encoder.layernorm")),
    "minilm": Network("MiniLM-L3", 32, _minilm, ("encoder.encoder.layer.2",), text=True),
    "minilm6": Network("MiniLM-L6", 32, _minilm_l6, ("encoder.encoder.layer.5",), text=True),
    "smollm": Network("SmolLM2-135M", 32, _smollm, ("encoder.layers.29", "encoder.norm"), text=True),
}


def stored(task: Task, data_dir: str | None) -> Images:
    """What a task has stored, with labels; Olivetti has no split, two of ten faces a person are tested."""
    if task.file == "olivetti":
        folder = find_data_dir(data_dir, require=["olivetti.npz"])
        with np.load(Path(folder) / "olivetti.npz", allow_pickle=False) as file:
            x, y = file["images"], torch.from_numpy(file["subject"].astype(np.int64))
        held = torch.arange(len(y)) % 10 >= 8
        return Images(x[~held.numpy()], y[~held], x[held.numpy()], y[held], 40)
    if task.text:
        folder = find_data_dir(data_dir, require=[f"{task.file}.npz"])
        with np.load(folder / f"{task.file}.npz", allow_pickle=False) as file:
            y, yt = (torch.from_numpy(file[f"y_{part}"].astype(np.int64)) for part in ("train", "test"))
            return Images(file["text_train"], y, file["text_test"], yt, int(y.max()) + 1)
    found = images(task.file, data_dir)
    if not task.coarse:
        return found
    with np.load(find_data_dir(data_dir) / f"{task.file}.npz", allow_pickle=False) as file:
        coarse = torch.from_numpy(file["coarse_of_fine"].astype(np.int64))
    return Images(found.train_x, coarse[found.train_y], found.test_x, coarse[found.test_y], 20)


def drawn(
    task: Task, network: Network, prepared: Any, most: int, tested: int, data_dir: str | None = None
) -> tuple[Inputs, Tensor, Inputs, Tensor]:
    """Pool and test samples of a task.

    Args:
        task: The task.
        network: The network that takes them.
        prepared: Mean and deviation of each channel, or a tokenizer.
        most: Samples in the pool, about equally many of each class.
        tested: Test samples, likewise.
        data_dir: Folder of the data.

    Returns:
        Pool samples and labels, test samples and labels.
    """
    found = stored(task, data_dir)
    pool, test = pools(found, most, tested)
    x, xt = (
        samples(part[at.numpy()], network, prepared)
        for part, at in ((found.train_x, pool), (found.test_x, test))
    )
    return x, found.train_y[pool], xt, found.test_y[test]


def pools(found: Images, most: int, tested: int) -> tuple[Tensor, Tensor]:
    """Positions of the samples that draws are made of, and of those tested: about as many of each class."""
    return _balanced(found.train_y, most), _balanced(found.test_y, tested)


def samples(x: np.ndarray, network: Network, prepared: Any) -> Inputs:
    """Stored images or texts as a network takes them."""
    return tokens(x, prepared, network.side) if network.text else pixels(x, prepared, network.side, 3)


def _balanced(labels: Tensor, most: int) -> Tensor:
    """About equally many positions of every class, at most ``most`` in all."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    rank = torch.empty_like(labels)
    for label in labels.unique():
        own = labels[order] == label
        rank[order[own]] = torch.arange(int(own.sum()))
    by_rank = order[torch.argsort(rank[order], stable=True)]
    return by_rank[:most]
