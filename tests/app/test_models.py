"""Networks and weights by name: every source, every format, every way to be wrong."""

import json
import os
import py_compile
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from linnet.app import cli
from linnet.app.models import apply_weights, load_model, load_weights
from linnet.errors import DataError, DependencyError, FileFormatError, InputError, ModelError, WeightsError
from linnet.fitting.last_layer import PADDING, Appended, ending_linear

NETS = '''
"""A few factories."""
import torch
from torch import nn
from neighbor import WIDTH

class Net(nn.Module):
    def __init__(self, depth=1, classes=2):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, classes)
    def forward(self, x):
        return self.head(self.norm(self.body(x)))

def build(**arguments):
    return Net(**arguments)

def breaks():
    raise KeyError("no such width")

def number():
    return 3

made = Net()
constant = 4
def _private(): ...
'''


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    (tmp_path / "neighbor.py").write_text("WIDTH = 3\n")
    (tmp_path / "neighbor.txt").write_text("WIDTH = 3\n")
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


@pytest.fixture(autouse=True)
def _forget_neighbor() -> None:
    sys.modules.pop("neighbor", None)


class TestFactories:
    def test_arguments(self, nets: Path) -> None:
        path_before = list(sys.path)
        for factory in ("build", "Net"):
            model = load_model(f"{nets}:{factory}", model_args={"classes": 5})
            assert model(torch.zeros(2, 3)).shape == (2, 5)
        assert not model.training
        assert sys.path == path_before

    def test_weights_are_put_in(self, nets: Path, tmp_path: Path) -> None:
        trained = load_model(f"{nets}:build")
        with torch.no_grad():
            trained.head.bias.fill_(7.0)  # type: ignore[operator, union-attr]
        torch.save(trained.state_dict(), tmp_path / "w.pt")
        loaded = load_model(f"{nets}:build", weights=tmp_path / "w.pt")
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(loaded(x), trained(x))

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("{nets}", r"names no factory.*nets\.py:FUNCTION"),
            ("{nets}:", "names no factory"),
            ("{nets}:absent", "no factory 'absent'.*defines: Net, build, breaks, number"),
            ("{nets}:constant", "no factory 'constant'"),
            ("{nets}:made", "no factory 'made'"),
            ("{nets}:number", r"returned an object of type int.*Expected: a torch\.nn\.Module"),
            ("{folder}/nothing.py:build", r"there is no file .*nothing\.py"),
            ("{folder}/neighbor.txt:build", "is no Python file"),
            ("keras:resnet", r"there is no file keras.*hf:NAME, timm:NAME or torchvision:NAME"),
        ],
    )
    def test_what_is_wrong_is_named(self, nets: Path, spec: str, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            load_model(spec.format(nets=nets, folder=nets.parent))

    def test_a_factory_that_raises(self, nets: Path) -> None:
        with pytest.raises(ModelError, match=r"factory breaks of .*raised KeyError.*no such width") as caught:
            load_model(f"{nets}:breaks")
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(ModelError, match=r'unexpected keyword argument.*now {"depht": 3}') as caught:
            load_model(f"{nets}:build", model_args={"depht": 3})
        assert isinstance(caught.value.__cause__, TypeError)

    @pytest.mark.parametrize("text", ["import no_such_package_of_mine", "def f(:", "raise SystemExit(1)"])
    def test_a_file_that_cannot_be_imported(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "broken.py"
        path.write_text(text)
        with pytest.raises(ModelError, match=r"broken\.py raised \w+ while it was imported") as caught:
            load_model(f"{path}:f")
        assert caught.value.__cause__ is not None
        assert not [name for name in sys.modules if "broken" in name and name.startswith("_linnet_model")]

    def test_bytecode_beside_the_file_is_never_run(self, tmp_path: Path) -> None:
        """Whoever sends a folder could hide other code in it than the text that is shown and trusted."""
        path = tmp_path / "net.py"
        path.write_text("import torch\ndef f(): return torch.nn.Tanh()\n")
        good = path.stat()
        path.write_text("import torch\ndef f(): return torch.nn.ReLU()\n")
        os.utime(path, ns=(good.st_atime_ns, good.st_mtime_ns))
        py_compile.compile(str(path))
        path.write_text("import torch\ndef f(): return torch.nn.Tanh()\n")
        os.utime(path, ns=(good.st_atime_ns, good.st_mtime_ns))
        assert (tmp_path / "__pycache__").is_dir()
        assert isinstance(load_model(f"{path}:f"), torch.nn.Tanh)


class TestHuggingFace:
    def save(self, folder: Path, name: str, config: dict[str, object]) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        built = getattr(transformers, f"{name.split('For')[0].removesuffix('Model')}Config")(**config)
        model: nn.Module = getattr(transformers, name)(built).eval()
        model.save_pretrained(folder)  # type: ignore[operator]
        return model

    def test_text_classifier_from_a_folder(self, tmp_path: Path) -> None:
        small = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        saved = self.save(tmp_path, "BertForSequenceClassification", {**small, "intermediate_size": 8})
        model = load_model(f"hf:{tmp_path}")
        ids = torch.arange(6).reshape(2, 3)
        assert type(model) is type(saved)
        torch.testing.assert_close(model(ids).logits, saved(ids).logits)

    def test_image_classifier_from_a_folder_with_other_weights(self, tmp_path: Path) -> None:
        small = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
        saved = self.save(tmp_path, "ResNetForImageClassification", {**small, "num_labels": 3})
        zeros = {name: torch.zeros_like(tensor) for name, tensor in saved.state_dict().items()}
        save_file(zeros, str(tmp_path / "zeros.safetensors"))
        images = torch.ones(1, 3, 16, 16)
        torch.testing.assert_close(load_model(f"hf:{tmp_path}")(images).logits, saved(images).logits)
        model = load_model(f"hf:{tmp_path}", weights=tmp_path / "zeros.safetensors")
        assert torch.equal(model(images).logits, torch.zeros(1, 3))

    def test_a_folder_that_is_no_model(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        with pytest.raises(ModelError, match=f"could not build model 'hf:{tmp_path}'") as caught:
            load_model(f"hf:{tmp_path}")
        assert isinstance(caught.value.__cause__, (OSError, ValueError))

    def test_a_checkpoint_without_a_head_is_an_encoder_that_masks_its_padding(self, tmp_path: Path) -> None:
        small = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        saved = self.save(tmp_path, "BertModel", {**small, "intermediate_size": 8, "pad_token_id": 3})
        ids = torch.tensor([[5, 6, 7, 3, 3], [8, 9, 3, 3, 3], [4, 6, 5, 9, 8]])
        states = saved(ids, attention_mask=(ids != 3).long()).last_hidden_state
        mean = torch.stack([states[0, :3].mean(0), states[1, :2].mean(0), states[2].mean(0)])
        for pretrained in (True, False):
            model = load_model(f"hf:{tmp_path}", pretrained=pretrained)
            apply_weights(model, saved.state_dict())
            assert type(model) is type(saved)
            for part in (None, "last_hidden_state"):
                appended = ending_linear(model, ids, part)
                assert isinstance(appended, Appended)
                appended.head = nn.Identity()
                torch.testing.assert_close(appended(ids), mean)

    def test_the_padding_of_the_tokenizer_counts_where_no_other_is_named(self, tmp_path: Path) -> None:
        transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
        self.save(tmp_path, "GPT2Model", {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2})
        words = {"a": 0, "b": 1, "<none>": 2}
        plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
        assert not hasattr(load_model(f"hf:{tmp_path}"), PADDING)
        transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<none>").save_pretrained(
            tmp_path
        )
        assert getattr(load_model(f"hf:{tmp_path}"), PADDING) == 2

    def test_texts_of_another_width_are_filled_up_or_named(self, tmp_path: Path) -> None:
        small = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.save(tmp_path / "net", "BertModel", {**small, "intermediate_size": 8})
        ids = torch.randint(1, 20, (24, 6), generator=torch.Generator().manual_seed(0)).numpy()
        np.savez(
            tmp_path / "d.npz", x_train=ids, y_train=np.arange(24) % 2, x_test=ids, y_test=np.arange(24) % 2
        )
        for name, x in (
            ("same", np.pad(ids[:, :4], ((0, 0), (0, 2)))),
            ("short", ids[:, :4]),
            ("long", ids.repeat(2, 1)),
        ):
            np.savez(tmp_path / f"{name}.npz", x=x)
        run = str(tmp_path / "run")
        made = ["adapt", "--model", f"hf:{tmp_path / 'net'}", "--data", str(tmp_path / "d.npz"), "--out", run]
        assert cli.main([*made, "--quick"]) == 0
        found = {}
        for name in ("same", "short"):
            out = tmp_path / f"{name}.json"
            asked = ["predict", "--run", run, "--data", str(tmp_path / f"{name}.npz"), "--out", str(out)]
            assert cli.main(asked) == 0
            found[name] = [row["probability"] for row in json.loads(out.read_text())]
        assert found["short"] == pytest.approx(found["same"])
        with pytest.raises(DataError, match='padding="max_length", truncation=True, max_length=6'):
            cli.main(["predict", "--run", run, "--data", str(tmp_path / "long.npz"), "--traceback"])

    def test_a_masked_language_model_is_an_encoder(self, tmp_path: Path) -> None:
        small = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        saved = self.save(tmp_path, "BertForMaskedLM", {**small, "intermediate_size": 8})
        ids = torch.arange(1, 7).reshape(2, 3)
        found = load_model(f"hf:{tmp_path}")(ids).last_hidden_state
        torch.testing.assert_close(found, saved.bert(ids).last_hidden_state)  # type: ignore[operator, union-attr]

    def test_a_model_that_is_none_of_these(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        transformers.VisionEncoderDecoderConfig(
            encoder={"model_type": "vit"}, decoder={"model_type": "bert"}
        ).save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="no encoder and no classifier"):
            load_model(f"hf:{tmp_path}")


class TestOptionalPackages:
    def install(self, folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, text: str) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(text)
        (folder / package / "models.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))

    @pytest.mark.parametrize(("package"), ["timm", "torchvision", "transformers"])
    def test_a_package_that_does_not_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        cause = "RuntimeError('operator torchvision::nms does not exist')"
        self.install(tmp_path, monkeypatch, package, f"raise {cause}")
        source = {"transformers": "hf"}.get(package, package)
        with pytest.raises(DependencyError, match=rf"{package}, which.*{source}:x.*nms does not") as caught:
            load_model(f"{source}:x")
        assert isinstance(caught.value.__cause__, RuntimeError)

    @pytest.mark.parametrize(
        ("package", "factory", "flag"),
        [("timm", "create_model", "pretrained"), ("torchvision", "get_model", "weights")],
    )
    def test_pretrained_unless_weights_are_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, factory: str, flag: str
    ) -> None:
        text = (
            "from torch import nn\n"
            f"def {factory}(name, {flag}, width=2):\n"
            "    if name == 'unknown': raise ValueError('Unknown model unknown')\n"
            f"    model = nn.Linear(width, 1); model.flag = {flag}; model.name = name\n"
            "    return model\n"
        )
        self.install(tmp_path, monkeypatch, package, text)
        save_file({"weight": torch.ones(1, 3), "bias": torch.zeros(1)}, str(tmp_path / "w.safetensors"))
        plain = load_model(f"{package}:tiny")
        given = load_model(f"{package}:tiny", tmp_path / "w.safetensors", {"width": 3})
        assert plain.flag in (True, "DEFAULT")
        assert given.flag in (False, None)
        assert given(torch.ones(1, 3)).item() == 3.0
        with pytest.raises(
            ModelError, match=f"could not build model '{package}:unknown'.*Unknown.*--weights"
        ):
            load_model(f"{package}:unknown")


STATE = {"body.weight": torch.arange(6.0).reshape(2, 3), "body.bias": torch.tensor([0.5, -0.5])}


def assert_state(weights: dict[str, Tensor]) -> None:
    assert list(weights) == list(STATE)
    assert all(torch.equal(weights[name], STATE[name]) for name in STATE)


class TestReading:
    def test_torch_files(self, tmp_path: Path) -> None:
        for suffix in (".pt", ".pth", ".th", ".tar", ".bin", ".ckpt", ".PT"):
            for zipped in (True, False):
                torch.save(STATE, tmp_path / f"w{suffix}", _use_new_zipfile_serialization=zipped)
                assert_state(load_weights(tmp_path / f"w{suffix}"))

    def test_nesting_and_prefixes(self, tmp_path: Path) -> None:
        for keys in (["state_dict"], ["model"], ["model_state_dict"], ["model", "state_dict"]):
            for prefix in ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
                content: dict[str, object] = {prefix + name: tensor for name, tensor in STATE.items()}
                for key in keys:
                    content = {"epoch": 3, key: content, "best": 0.9}
                torch.save(content, tmp_path / "w.pt")
                assert_state(load_weights(tmp_path / "w.pt"))

    def test_a_prefix_of_some_names_belongs_to_them(self, tmp_path: Path) -> None:
        torch.save({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "w.pt")
        assert list(load_weights(tmp_path / "w.pt")) == ["module.a", "b"]

    def test_safetensors(self, tmp_path: Path) -> None:
        save_file(
            {f"module.{name}": tensor for name, tensor in STATE.items()}, str(tmp_path / "w.safetensors")
        )
        weights = load_weights(tmp_path / "w.safetensors")
        assert_state({name: weights[name] for name in STATE})

    def test_npz(self, tmp_path: Path) -> None:
        for packed in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
            write_npz(tmp_path / "w.npz", packed)
            assert_state(load_weights(tmp_path / "w.npz"))

    def test_code_in_a_file_is_not_run(self, tmp_path: Path) -> None:
        marker = tmp_path / "ran"
        torch.save({"state_dict": STATE, "extra": Touch(str(marker))}, tmp_path / "w.pt")
        with pytest.raises(FileFormatError, match=r"holds more than weights.*model\.state_dict\(\)"):
            load_weights(tmp_path / "w.pt")
        torch.save(nn.Linear(1, 1), tmp_path / "w.pt")
        with pytest.raises(FileFormatError, match="holds more than weights"):
            load_weights(tmp_path / "w.pt")
        assert not marker.exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([1, 2], "holds a list.*a dictionary of tensors"),
            ({}, "holds no tensors"),
            ({"epoch": 3, "net": STATE}, "holds other things than tensors: epoch, net"),
        ],
    )
    def test_torch_files_without_weights(self, tmp_path: Path, content: object, message: str) -> None:
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(FileFormatError, match=message):
            load_weights(tmp_path / "w.pt")

    def test_npz_of_text_or_of_objects(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "w.npz", names=np.array(["a", "b"]))
        with pytest.raises(FileFormatError, match=r"array names of .* has the type <U1"):
            load_weights(tmp_path / "w.npz")
        np.savez(tmp_path / "w.npz", w=np.array([1, None]))
        with pytest.raises(FileFormatError, match=r"array w of .* holds Python objects"):
            load_weights(tmp_path / "w.npz")

    def test_unknown_suffix_and_missing_file(self, tmp_path: Path) -> None:
        (tmp_path / "w.h5").write_bytes(b"x")
        with pytest.raises(InputError, match=r"unknown suffix '\.h5'.*\.safetensors, \.npz, \.pt"):
            load_weights(tmp_path / "w.h5")
        with pytest.raises(
            InputError, match=r"weights is .*w\.pt, and there is no such file.*beside it are: w\.h5"
        ):
            load_weights(tmp_path / "w.pt")

    @pytest.mark.parametrize("suffix", [".pt", ".th", ".npz", ".safetensors"])
    def test_every_truncation_is_an_error(self, tmp_path: Path, suffix: str) -> None:
        path = write_weights(tmp_path / f"w{suffix}")
        content = path.read_bytes()
        for length in range(0, len(content), 23):
            path.write_bytes(content[:length])
            with pytest.raises(FileFormatError, match=str(path)):
                load_weights(path)

    @pytest.mark.parametrize("suffix", [".pt", ".npz"])
    def test_flipped_bits_never_give_other_weights(self, tmp_path: Path, suffix: str) -> None:
        path = write_weights(tmp_path / f"w{suffix}")
        content = path.read_bytes()
        refused = 0
        for position in range(0, len(content), 11):
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            path.write_bytes(flipped)
            try:
                assert_state(load_weights(path))
            except FileFormatError:
                refused += 1
        assert refused > 5

    @pytest.mark.parametrize("suffix", [".pt", ".th", ".npz", ".safetensors"])
    def test_foreign_files(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"w{suffix}"
        for content in (b"", b"\x89PNG\r\n\x1a\n" + bytes(200), b"<html>404</html>", b"PK\x03\x04"):
            path.write_bytes(content)
            with pytest.raises(FileFormatError, match=r"truncated|no torch file|not an \.npz"):
                load_weights(path)


class Touch:
    """What leaves a file behind when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return touch, (self.path,)


def touch(path: str) -> None:
    Path(path).touch()


def write_npz(path: Path, packed: int) -> None:
    """An archive with any of zip's compressions."""
    with zipfile.ZipFile(path, "w", packed) as archive:
        for name, tensor in STATE.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, tensor.numpy(), allow_pickle=False)


def write_weights(path: Path) -> Path:
    if path.suffix == ".npz":
        write_npz(path, zipfile.ZIP_LZMA)
    elif path.suffix == ".safetensors":
        save_file(STATE, str(path))
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=path.suffix == ".pt")
    return path


class TestApplying:
    def test_all_keys_at_fault_are_counted_and_nothing_is_changed(self) -> None:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)])
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        weights = {f"{layer}.weight": torch.zeros(2, 2) for layer in range(5)}
        weights |= {f"extra.{i}": torch.zeros(1) for i in range(3)}
        weights["0.bias"] = torch.zeros(3)
        weights["1.weight"] = torch.tensor([[0.0, float("nan")], [0.0, 0.0]])
        weights["2.weight"] = torch.full((2, 2), float("inf"))
        weights["3.weight"] = torch.zeros(2, 2, dtype=torch.int8)
        with pytest.raises(WeightsError) as caught:
            apply_weights(model, weights)
        assert caught.value.what == (
            "the weights do not fit Sequential: "
            "6 missing: 1.bias, 2.bias, 3.bias, 4.bias, 5.weight, 5.bias; "
            "3 unexpected: extra.0, extra.1, extra.2; "
            "2 of another shape or type: 0.bias (network: float32 (2,), weights: float32 (3,)), "
            "3.weight (network: float32 (2, 2), weights: int8 (2, 2)); "
            "2 not finite: 1.weight, 2.weight"
        )
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_long_lists_are_cut_after_eight(self) -> None:
        with pytest.raises(WeightsError, match=r"12 unexpected: k0, .*k7 and 4 more"):
            apply_weights(nn.Flatten(), {f"k{i}": torch.zeros(1) for i in range(12)})

    def test_a_head_of_another_size_is_a_mismatch(self, nets: Path, tmp_path: Path) -> None:
        torch.save(load_model(f"{nets}:build").state_dict(), tmp_path / "w.pt")
        with pytest.raises(
            WeightsError, match=r"head\.weight \(network: float32 \(9, 3\), weights: .*\(2, 3\)\)"
        ):
            load_model(f"{nets}:build", tmp_path / "w.pt", {"classes": 9})

    def test_tied_weights_may_be_given_once(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        apply_weights(model, {"0.weight": torch.full((2, 2), 5.0)})
        assert torch.equal(model[1].weight, torch.full((2, 2), 5.0))
        with pytest.raises(WeightsError, match=r"2 missing: 0\.weight, 1\.weight"):
            apply_weights(model, {})

    def test_batch_counters_may_be_missing_but_statistics_not(self) -> None:
        model = nn.BatchNorm1d(2)
        weights = dict(nn.BatchNorm1d(2).state_dict())
        del weights["num_batches_tracked"]
        apply_weights(model, weights | {"running_mean": torch.tensor([1.0, 2.0])})
        assert torch.equal(model.running_mean, torch.tensor([1.0, 2.0]))  # type: ignore[arg-type]
        del weights["running_var"]
        with pytest.raises(WeightsError, match="1 missing: running_var"):
            apply_weights(model, weights)

    def test_precision_of_the_network_is_kept(self) -> None:
        model = nn.Linear(1, 1)
        apply_weights(model, {name: tensor.double() for name, tensor in model.state_dict().items()})
        assert model.weight.dtype == torch.float32


def data_folder() -> Path:
    from experiments.locate import find_data_dir
    from linnet.errors import DataError

    try:
        return find_data_dir(require=["weights/nets.py"])
    except DataError as error:
        pytest.skip(f"needs the data folder: {error}")


@pytest.mark.parametrize(
    ("factory", "weights", "arguments", "parameters"),
    [
        ("CifarResNet", "resnet20-12fca82f.th", {"depth": 20}, 269_722),
        ("CifarResNet", "resnet56-4bfd9763.th", {"depth": 56}, 853_018),
        ("DenseNetBC", "densenetbc100_cifar100.pth.tar", {"classes": 100}, 800_032),
        ("MobileNetV2Folded", "mobilenetv2_1.0_224_imagenet_tf2ptq_folded.npz", {}, 3_487_816),
    ],
)
@pytest.mark.thinned(2)
def test_published_weights(factory: str, weights: str, arguments: dict[str, int], parameters: int) -> None:
    folder = data_folder() / "weights"
    model = load_model(f"{folder / 'nets.py'}:{factory}", folder / weights, arguments)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    stored = load_weights(folder / weights)
    assert all(
        torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items() if name in stored
    )
