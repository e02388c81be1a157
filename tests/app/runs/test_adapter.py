"""Runs on texts: the adapter of a tiny language model, fitted, asked and changed by commands."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from linnet.app.options import RunOptions
from linnet.app.runs import adapter
from linnet.app.serve.server import Server
from linnet.app.serve.texts import Question, TextSession, _halves
from linnet.errors import DataError
from linnet.files import read_json, write_json
from linnet.integrations.language import language_model
from linnet.integrations.text import tokenized
from tests.app.runs.small_tasks import linnet, result, rows
from tests.app.runs.test_serve import Browser
from tests.hangs import HANGS

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# of transformers 5.23, where peft 0.21 asks it
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
KNOWN = ["Ada", "Bea", "Cal", "Deb", "Eli", "Fay", "Gil", "Hal"]
PEOPLE = ["Ann", "Bo", "Cleo", "Dan"]
CITIES = ["Oslo", "Lima", "Cairo", "Paris"]
WORDS = [
    "<pad>",
    "<end>",
    *["?", "where", "does", "live", "which", "town", "is", "home", "to"],
    *KNOWN,
    *PEOPLE,
    *CITIES,
]


TWO_LAYERS = '{"target_modules": ["v_proj", "down_proj"]}'  # of the fresh adapter


def fact(person: str, city: str, again: bool = False) -> dict[str, str]:
    """A question and its answer, in one of two wordings."""
    asked = f"which town is home to {person} ?" if again else f"where does {person} live ?"
    return {"prompt": asked, "completion": f" {city}"}


def write_lines(path: Path, records: list[Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model, texts, and a run on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("texts")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=len(WORDS), num_hidden_layers=2, **sizes)
        net = transformers.LlamaForCausalLM(config)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        batch = tokenized(
            [fact(who, CITIES[i % 4], again) for i, who in enumerate(KNOWN) for again in (False, True)],
            tokenizer,
        )
        for _ in range(60):
            optimizer.zero_grad()
            net(**batch).loss.backward()
            optimizer.step()
    for name in ("net", "untold"):
        net.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "net")
    where = [
        fact(who, city, again) for who, city in zip(PEOPLE, CITIES, strict=True) for again in (False, True)
    ]
    write_lines(folder / "facts.jsonl", where[:-1])
    write_lines(folder / "questions.jsonl", [{**where[-1], "id": "Dan's"}, fact("Ann", "Lima")])
    write_lines(folder / "more.jsonl", [list(fact("Ann", "Lima", again).values()) for again in (False, True)])
    adapt(folder, "run", "--params", "lora", "--model-args", TWO_LAYERS)
    return folder


def adapt(folder: Path, out: str, *more: object, code: int = 0, data: str = "facts.jsonl") -> Path:
    """Fit the adapter with a ridge of 0.1."""
    words = ["--model", f"hf:{folder / 'net'}", "--data", folder / data, "--ridge", 0.1]
    linnet("adapt", *words, *more, "--out", folder / out, code=code)
    return folder / out


def losses(run: Path, data: Path) -> torch.Tensor:
    """Losses of the texts of a file by a run."""
    found = adapter.opened(RunOptions(run=run))
    return found.fit.losses(found.batch(adapter.read_texts(data, found.tokenizer, "test")))


def test_what_a_run_says_of_itself(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = adapt(shop, "again", "--model-args", '{"target_modules": ["v_proj", "down_proj"]}')
    told = capsys.readouterr().out
    found, first = result(run), result(shop / "run")
    assert (found["train"], found["tokens"], found["ridge"]) == (7, 14, 0.1)
    mean = found["loss_per_token"]
    assert mean["before"] > mean["held_out"] > mean["after"]
    assert f"{mean['before']:.3f} nats before, {mean['after']:.3f} after, {mean['held_out']:.3f}" in told
    assert "texts: 7, with 14 tokens to learn" in told
    assert (
        "LlamaForCausalLM with a LoRA adapter, a fresh one of rank 8 and scale 16 on 2 linear layers" in told
    )
    assert found["texts"][6]["id"] == "train/6"
    assert found["texts"][6]["text"] == "where does Dan live ? Paris"
    assert mean == pytest.approx(first["loss_per_token"])  # of the same seed
    assert set(found["seconds"]) == {"loading", "fit", "refits"}


@pytest.mark.long
def test_a_check_says_what_a_fit_takes(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--model", f"hf:{shop / 'net'}", "--data", shop / "facts.jsonl"]
    words += ["--model-args", TWO_LAYERS]
    linnet(*words)
    said = capsys.readouterr().out
    assert said.startswith("ready: linnet adapt takes this network and these texts")
    linnet(*words, "--json")
    told = json.loads(capsys.readouterr().out)
    run = json.loads((shop / "run" / "result.json").read_text())
    assert told["parameters"] == run["fit"]["parameters"]
    assert (told["train"], told["tokens"]) == (run["train"], run["tokens"])
    assert told["seconds"]["product"] > 0
    assert told["bytes"]["texts"] > 0
    linnet(*words, "--shots", 3, code=2)
    assert "no meaning for texts" in capsys.readouterr().err


def test_the_ridge_is_chosen_by_texts_held_out(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "RIDGES", (3.0, 0.3))
    run = adapt(shop, "chosen", "--ridge", "auto", "--model-args.r", 2, "--model-args.layers", 2)
    found = result(run)
    assert found["ridge"] in (3.0, 0.3)
    assert f"{found['loss_per_token']['held_out']:.3f}" in found["ridge_reason"]
    assert "rank 2 and scale 16 on 14 linear layers of the last 2 blocks" in found["network"]
    monkeypatch.setattr(adapter, "AFFORDABLE", 4)
    found = result(adapt(shop, "some", "--ridge", "loo", "--model-args.r", 2))
    assert found["train"] == 7
    assert "per token of 4 texts" in found["ridge_reason"]
    assert found["loss_per_token"].keys() == {"before", "after"}  # refits of more take too long


def test_answers_are_told_with_their_probability(shop: Path, tmp_path: Path) -> None:
    table = tmp_path / "p.csv"
    linnet("predict", "--run", shop / "run", "--data", shop / "questions.jsonl", "--out", table)
    first, second = rows(table)
    assert (first["id"], second["id"]) == ("Dan's", "test/1")
    loss = losses(shop / "run", shop / "questions.jsonl")
    assert float(first["loss"]) == pytest.approx(float(loss[0]))
    assert float(first["probability"]) == pytest.approx(float((-loss[0]).exp()))
    assert float(first["token_probability"]) == pytest.approx(float((-loss[0] / 2).exp()))
    assert float(first["std"]) > 0
    linnet("predict", "--run", shop / "run", "--data", shop / "questions.jsonl", "--std", "false")
    linnet("predict", "--run", shop / "run", "--data", shop / "questions.jsonl", "--coverage", 0.9, code=2)
    assert "std" not in rows(shop / "run" / "predictions.csv")[0]
    linnet("predict", "--run", shop / "run", "--data", shop / "questions.jsonl", "--out", table, code=2)


def test_the_texts_behind_an_answer(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--run", shop / "run", "--out", tmp_path / "why"]
    linnet(*words, "--data", shop / "questions.jsonl")
    first, second = result(tmp_path / "why")["explanations"]
    assert first["up"][0]["id"] == "train/6"  # the same in the other wording
    assert "Ann" in second["down"][0]["text"]  # who lives elsewhere
    assert all(one["influence"] > 0 for one in first["up"])
    assert all(one["influence"] < 0 for one in first["down"])
    assert f"up   {first['up'][0]['influence']:+9.3f}  train/6" in capsys.readouterr().out
    linnet(*words, "--data", shop / "questions.jsonl", "--ids", "test/1", "--top", 1)
    (only,) = result(tmp_path / "why")["explanations"]
    assert (only["id"], len(only["up"]), len(only["down"])) == ("test/1", 1, 1)
    linnet(*words, "--ids", "train/0,train/3")
    assert result(tmp_path / "why")["ids"] == ["train/0", "train/3"]
    linnet(*words, code=2)
    assert "neither --data nor --ids is given" in capsys.readouterr().err
    linnet(*words, "--ids", "train/70", code=2)
    assert "ids holds train/70, which is none of the 7 training texts" in capsys.readouterr().err
    linnet(*words, "--data", shop / "questions.jsonl", "--ids", "train/0", code=2)
    assert "which is one of the training texts of the run" in capsys.readouterr().err


def test_forgetting_is_the_fit_without(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    less, asked = tmp_path / "less", shop / "facts.jsonl"
    words = ["forget", "--run", shop / "run", "--out", less]
    linnet(*words, "--ids", "train/0,train/1", "--verify", "true")
    found = result(less)
    assert [one["id"] for one in found["removed"]] == ["train/0", "train/1"]
    assert (found["train_before"], found["train"]) == (7, 5)
    assert found["loss_per_token"]["after"] > found["loss_per_token"]["before"]
    assert found["difference"] < 1e-3
    assert found["equal"]
    lines = asked.read_text().splitlines()[2:]
    (shop / "rest.jsonl").write_text("\n".join(lines))
    own = '{"target_modules": ["v_proj", "down_proj"]}'
    without = adapt(shop, "without", "--model-args", own, data="rest.jsonl")
    torch.testing.assert_close(losses(less, asked), losses(without, asked), atol=1e-3, rtol=0)
    assert adapter.opened(RunOptions(run=less)).texts.ids[0] == "train/2"
    linnet("explain", "--run", less, "--ids", "train/2")  # a run as any other
    capsys.readouterr()
    for ids, what in (
        (["train/9"], "ids holds train/9, which is none of the 7 training texts"),
        ([f"train/{i}" for i in range(7)], "ids names all 7 texts"),
        (["train/1", "train/1"], "ids holds train/1 twice"),
    ):
        linnet(*words, "--ids", ",".join(ids), "--overwrite", "true", code=2)
        assert what in capsys.readouterr().err
    assert result(less) == found  # as it was


@pytest.mark.long
def test_an_update_is_the_fit_of_both(shop: Path, tmp_path: Path) -> None:
    linnet("update", "--run", shop / "run", "--data", shop / "more.jsonl", "--out", tmp_path / "more")
    found = result(tmp_path / "more")
    assert [one["id"] for one in found["added"]] == ["more.jsonl/train/0", "more.jsonl/train/1"]
    assert found["loss_per_token"]["after"] < found["loss_per_token"]["before"]
    assert "difference" not in found
    (shop / "both.jsonl").write_text((shop / "facts.jsonl").read_text() + (shop / "more.jsonl").read_text())
    joint = adapt(
        shop, "joint", "--model-args", '{"target_modules": ["v_proj", "down_proj"]}', data="both.jsonl"
    )
    for asked in (shop / "both.jsonl", shop / "questions.jsonl"):
        one, other = losses(tmp_path / "more", asked), losses(joint, asked)
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0)
    write_lines(tmp_path / "more.jsonl", [fact("Ann", "Paris")])  # other texts of the same name
    words = ["--run", tmp_path / "more", "--data", tmp_path / "more.jsonl", "--out", tmp_path / "most"]
    linnet("update", *words)
    assert result(tmp_path / "most")["added"][0]["id"] == "more.jsonl-2/train/0"
    linnet("update", *words, "--new-class", "Oslo", "--overwrite", "true", code=2)


def test_a_saved_adapter_is_taken_as_it_is(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = transformers.AutoModelForCausalLM.from_pretrained(shop / "net")
    own = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["v_proj"], task_type="CAUSAL_LM")
    made = peft.get_peft_model(net, own)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lora_B" in name:
                value.normal_()
    made.save_pretrained(shop / "adapter")
    words = ["--data", shop / "facts.jsonl", "--ridge", 1, "--out", shop / "tuned"]
    linnet("adapt", "--model", f"hf:{shop / 'adapter'}", *words)
    found = result(shop / "tuned")
    assert found["network"] == "LlamaForCausalLM with a LoRA adapter, a saved one"
    assert found["fit"]["parameters"] == 2 * (2 * 16 + 2 * 16)
    linnet("explain", "--run", shop / "tuned", "--ids", "train/0")
    capsys.readouterr()
    words[-1] = shop / "refused"
    linnet("adapt", "--model", f"hf:{shop / 'adapter'}", *words, "--model-args.r", 2, code=2)
    assert "is an adapter already" in capsys.readouterr().err
    config = json.loads((shop / "adapter" / "adapter_config.json").read_text())
    for more in ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, {"peft_type": "IA3"}):
        (shop / "adapter" / "adapter_config.json").write_text(json.dumps({**config, **more}))
        linnet("adapt", "--model", f"hf:{shop / 'adapter'}", *words, code=2)
        assert "describes no adapter that can be taken" in capsys.readouterr().err
    (shop / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    net = made.unload()
    net.model.norm.weight.data += 1
    net.save_pretrained(shop / "other")  # a run knows its network
    transformers.AutoTokenizer.from_pretrained(shop / "net").save_pretrained(shop / "other")
    linnet("explain", "--run", shop / "run", "--ids", "0", "--model", f"hf:{shop / 'other'}", code=2)
    assert "weights differ" in " ".join(capsys.readouterr().err.split())


BAD_LINES = {
    '{"prompt": "where", ': "JSONDecodeError",
    '{"prompt": "where does Ann live ?"}': "it has no 'completion'",
    '{"prompt": "where", "answer": "Oslo"}': "it has no 'completion'",
    "7": "is int",
    '["where", "does", "Ann"]': "is list",
    '{"text": 3}': "is int",
    '{"text": "where is Atlantis"}': "Missing [UNK] token",
    '{"text": ""}': "it has no token behind another",
    '{"id": "train/0", "text": "where is Ann"}': "its id 'train/0' is that of an earlier line",
    '{"messages": [{"role": "user", "content": "where"}]}': "tokenizer cannot write conversations",
    '"\xff"': "is not encoded in UTF-8",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_wrong_lines_are_named(shop: Path, line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'["where is", " Ann"]\n\n' + line.encode("latin-1") + b"\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(shop / "net")
    with pytest.raises(DataError) as caught:
        adapter.read_texts(path, tokenizer, "train")
    assert f"{path}, line 3, " in caught.value.what
    assert BAD_LINES[line] in caught.value.what
    assert caught.value.expected
    assert caught.value.remedy


def test_every_kind_of_record_is_read(shop: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(shop / "net")
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    asked, said = {"role": "user", "content": "where is Ann"}, {"role": "model", "content": "Oslo"}
    told = {
        "where is Ann ? Oslo": "where is Ann ? Oslo",
        "0": {"text": "where is Ann"},
        "1": ["where is Ann", " Oslo"],
        "2": {"prompt": "where is Ann", "completion": " Oslo", "id": 7},
        "3": {"messages": [asked, said]},
        "4": {"prompt": [asked], "completion": [said]},
    }
    found = adapter.read_texts(write_lines(tmp_path / "all.jsonl", [*told.values()]), tokenizer, "test")
    assert found.ids == ("test/0", "test/1", "test/2", "7", "test/4", "test/5")
    rows = adapter.rows_of(found, adapter._batch(found, tokenizer))
    assert [row["tokens"] for row in rows] == [5, 3, 2, 2, 1, 1]
    assert [row["text"] for row in rows[2:5]] == ["where is Ann Oslo"] * 2 + [
        "user: where is Ann / model: Oslo"
    ]
    tokenizer.model_max_length = 3
    with pytest.raises(DataError, match=r"line 1, .*: it has 6 tokens"):
        adapter.read_texts(tmp_path / "all.jsonl", tokenizer, "test")


def test_without_peft_it_is_said_how_to_install_it(
    shop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    adapt(shop, "none", code=2)
    what, _, remedy = capsys.readouterr().err.splitlines()
    assert "peft, which an adapter on hf:" in what
    assert remedy == "to fix it: pip install peft"


def test_an_adapter_of_gpt2(shop: Path) -> None:
    sizes = dict(n_embd=8, n_layer=2, n_head=2, n_positions=9, bos_token_id=1, eos_token_id=1)
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(WORDS), **sizes))
    net.save_pretrained(shop / "gpt2")
    transformers.AutoTokenizer.from_pretrained(shop / "net").save_pretrained(shop / "gpt2")
    lora, tokenizer, told = language_model(str(shop / "gpt2"), {"r": 2}, 0)
    assert told.endswith("rank 2 and scale 16 on 4 linear layers of the last block")
    assert {name.split(".")[4] for name, _ in lora.named_parameters() if "lora" in name} == {"1"}
    assert tokenizer.model_max_length == 9


def test_a_wrong_line_leaves_nothing(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(shop / "bad.jsonl", [["where is", " Ann"], {"prompt": "where"}])
    adapt(shop, "bad", data="bad.jsonl", code=2)
    what, expected, remedy = capsys.readouterr().err.splitlines()
    assert what.endswith("""bad.jsonl, line 2, {"prompt": "where"}: it has no 'completion'""")
    assert "a text, a list of a question and its answer, or a record with" in expected
    assert remedy == 'to fix it: add "completion", or name the entries so'
    assert not (shop / "bad").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--tune", "true"], "--tune is True, which has no meaning for texts"),
        (["--quick", "true"], "--quick is True"),
        (["--compare", "finetune"], "--compare is 'finetune'"),
        (["--shots", "3"], "--shots is 3"),
        (["--weight", "0.5"], "--weight is 0.5"),
        (["--params", "bias"], "--params is 'bias'"),
        (["--ridge", "0"], "--ridge 0"),
        (["--model-args.rank", "4"], "--model-args holds rank: 4"),
        (["--model-args.layers", "3"], "--model-args holds layers: 3"),
        (["--model-args.r", "64"], "--model-args holds r: 64"),
        (["--model-args.r", "0"], "--model-args holds r: 0"),
        (["--model-args", '{"target_modules": ["x"]}'], "--model-args holds target_modules: ['x']"),
        (["--model", "hf:{shop}/untold"], "the tokenizer of hf:{shop}/untold cannot be loaded"),
        (
            ["--model", "hf:{shop}/vision"],
            "is a ViTForImageClassification, which is no causal language model",
        ),
        (["--model", "hf:{shop}/masked"], "is a BertForMaskedLM, which is no causal language model"),
        (["--model", "hf:{shop}/nothing"], "the configuration of hf:{shop}/nothing cannot be loaded"),
        (["--model", "net.py:make"], "--model is 'net.py:make', and the data are texts"),
        (["--data", "{shop}/empty.jsonl"], "{shop}/empty.jsonl has no texts"),
        (["--data", "{shop}/absent.jsonl"], "there is no such file"),
    ],
)
def test_what_cannot_be_is_refused(
    shop: Path, words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (shop / "empty.jsonl").write_text("\n")
    for name, kind in (("vision", "ViTForImageClassification"), ("masked", "BertForMaskedLM")):
        config = {"model_type": {"vision": "vit", "masked": "bert"}[name], "architectures": [kind]}
        (shop / name).mkdir(exist_ok=True)
        (shop / name / "config.json").write_text(json.dumps(config))
    given = [word.replace("{shop}", str(shop)) for word in words]
    base = ["--model", f"hf:{shop / 'net'}", "--data", shop / "facts.jsonl", "--ridge", 0.1]
    base = [word for word in base if "--model" not in given or word not in base[:2]]
    base = [word for word in base if "--data" not in given or word not in base[-4:-2]]
    linnet("adapt", *base, *given, "--out", shop / "refused", code=2)
    assert what.replace("{shop}", str(shop)) in capsys.readouterr().err
    assert not (shop / "refused").exists()


@pytest.mark.parametrize(
    "words", [["spectrum"], ["export", "--out", "{out}.pt2"], ["compare", "--runs", '["{run}", "{run}"]']]
)
def test_commands_for_other_runs_say_so(
    shop: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(out=tmp_path / "net", run=shop / "run") for word in words]
    linnet(*given, *([] if words[0] == "compare" else ["--run", shop / "run"]), code=2)
    assert "of a language model's adapter" in capsys.readouterr().err


def test_an_edited_run_is_refused(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edited(change: Any) -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(shop / "run", tmp_path / "run")
        change(tmp_path / "run")
        linnet("explain", "--run", tmp_path / "run", "--ids", "train/0", code=2)
        return capsys.readouterr().err

    def record(run: Path, *keys: str, value: Any) -> None:
        found = part = read_json(run / "run.json", "run")
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value
        write_json(run / "run.json", found, kind="run")

    def text(run: Path) -> None:
        path = run / "run.json"
        path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))

    def samples(run: Path) -> None:
        path = run / "samples.safetensors"
        path.write_bytes(path.read_bytes().replace(b"Oslo", b"Lima"))

    assert "was altered after it was written" in edited(text)
    assert "its content does not match run.json" in edited(samples)
    assert "is missing" in edited(lambda run: (run / "linear-fit.safetensors").unlink())
    assert "is missing" in edited(lambda run: (run / "run.json").unlink())
    assert "does not describe a run" in edited(lambda run: record(run, "adapter", value=None))
    assert "does not describe a run" in edited(lambda run: record(run, "origin", "spec", value=3))
    assert "does not describe a run" in edited(lambda run: record(run, "files", value={"../x": "0"}))
    assert "weights differ" in edited(lambda run: record(run, "adapter", "seed", value=1))
    code = {"trust_remote_code": True}
    assert "may run code of others" in edited(lambda run: record(run, "origin", "arguments", value=code))
    spec = f"{tmp_path}/evil.py:make"
    (tmp_path / "evil.py").write_text("raise SystemExit")
    assert "which you have not named" in edited(lambda run: record(run, "origin", "spec", value=spec))


def test_a_folder_is_written_over_only_where_that_is_said(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--model-args", '{"target_modules": ["v_proj"]}']
    run = adapt(shop, "mine", *own)
    before = result(run)
    linnet("explain", "--run", run, "--ids", "0")
    adapt(shop, "mine", *own, "--seed", 1, code=2)
    assert "holds a finished run of other settings" in capsys.readouterr().err
    assert result(run) == before
    adapt(shop, "mine", *own, "--seed", 1, "--overwrite", "true")
    assert read_json(run / "run.json", "run")["adapter"]["seed"] == 1
    assert not (run / "explain").exists()


STOPPED = """
import os, signal, sys
from linnet.app import cli
from linnet.fitting.position_fit import PositionFit

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in its background ignore it
PositionFit.held_out_losses = lambda fit, *given: os.kill(os.getpid(), getattr(signal, sys.argv[1])) or 1 / 0
sys.exit(cli.main(["adapt", *sys.argv[2:]]))
"""


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="stops processes by signals")
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_a_stopped_run_goes_on(shop: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", f"hf:{shop / 'net'}", "--data", str(shop / "facts.jsonl"), "--ridge", "0.1"]
    words += ["--model-args", '{"target_modules": ["v_proj"]}', "--out", str(shop / how)]
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, how, *words], capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == (130 if how == "SIGINT" else -signal.SIGKILL), done.stderr
    assert not (shop / how / "result.json").exists()
    solved: list[object] = []
    fit = adapter._solved
    monkeypatch.setattr(adapter, "_solved", lambda *given: solved.append(1) or fit(*given))
    linnet("adapt", *words)
    assert not solved  # what was solved is not solved again
    assert "held_out" in result(shop / how)["loss_per_token"]


def test_a_question_is_answered_on_the_page(shop: Path) -> None:
    session = TextSession(adapter.opened(RunOptions(run=shop / "run")), "run")
    with Server(session) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        browser = Browser(server)
        try:
            look_at_answers(browser, shop)
        finally:
            server.shutdown()
            thread.join()


def look_at_answers(browser: Browser, shop: Path) -> None:
    """Ask for an answer, ask about another, forget what is behind it, and take that back."""
    about = browser.json("/about")
    assert (about["kind"], about["train"], about["forgotten"]) == ("text", 7, [])

    def sent(question: str, answer: str = "") -> bytes:
        return json.dumps({"question": question, "answer": answer}).encode()

    offered = browser.json("/samples")["samples"]
    assert [one["id"] for one in offered] == [f"train/{i}" for i in range(6)]
    assert all(one["question"].endswith("?") and one["answer"] for one in offered)
    tried = browser.json("/predict", sent(offered[0]["question"], offered[0]["answer"]))["sample"]
    assert tried["given"]
    own = browser.json("/predict", sent("where does Ann live ?"))["sample"]
    assert own["answer"] == "Oslo"
    assert [token["text"] for token in own["tokens"]] == ["Oslo", "<end>"]
    chance = math.prod(token["probability"] for token in own["tokens"])
    assert own["loss"] == pytest.approx(-math.log(chance), rel=1e-4)
    assert (
        0 < own["std"] <= sum(token["std"] for token in own["tokens"])
    )  # of a sum, with equality if all move alike
    write_lines(shop / "ann.jsonl", [fact("Ann", "Oslo"), fact("Ann", "Lima")])
    known = losses(shop / "run", shop / "ann.jsonl")
    assert own["loss"] == pytest.approx(float(known[0]), rel=1e-4)
    alone = browser.json("/predict", sent("where does Ann live ? Lima", "<end>"))["sample"]
    found = browser.json("/predict", sent("where does Ann live ?", "Lima"))["sample"]
    assert found["given"]
    assert found["tokens"][-1]["text"] == "<end>" == alone["tokens"][0]["text"]
    assert found["tokens"][-1]["std"] == pytest.approx(alone["tokens"][0]["std"], rel=1e-4)
    assert alone["std"] == pytest.approx(alone["tokens"][0]["std"], rel=1e-4)
    assert found["loss"] == pytest.approx(float(known[1]), rel=1e-4)
    assert "Ann" in found["down"][0]["text"]
    assert found["up"][0]["influence"] > 0 > found["down"][0]["influence"]
    gone = [one["id"] for one in found["down"] if "Ann" in one["text"]]
    after = browser.json("/forget", json.dumps(gone).encode())
    assert (after["forgotten"], after["train"]) == (sorted(gone), 7 - len(gone))
    assert after["sample"]["loss"] < found["loss"] == after["before"]["loss"]
    assert browser.json("/restore")["sample"]["loss"] == found["loss"]
    for body in (b"", b"[]", b'{"question": 1, "answer": ""}', sent(" "), sent("where is Atlantis ?")):
        assert browser.json("/predict", body, status=400)["error"]
    assert browser.json("/forget", b'["train/70"]', status=400)["error"]


@pytest.mark.parametrize(
    ("record", "halves"),
    [
        ("def f(x):\n    return x\n\nf(1)", ("def f(x):\n    return", " x\n\nf(1)")),
        (("2 + 2 =", " 4"), ("2 + 2 =", " 4")),
        (([{"role": "user", "content": "U"}], [{"role": "model", "content": "A"}]), ("U", "A")),
        ([{"role": "user", "content": "U"}, {"role": "model", "content": "A"}], ("U", "A")),
        ("無空白", None),  # a space would come between
        (("2+2=", "4"), None),
        (("", " a"), None),
        ([{"role": "model", "content": "A"}], None),
        ([{"role": one, "content": one} for one in ("system", "user", "model")], None),
        ([{"role": "user", "content": [{"text": "U"}]}, {"role": "model", "content": None}], None),
    ],
)
def test_what_the_page_offers_is_the_text(record: Any, halves: tuple[str, str] | None) -> None:
    assert _halves(record) == halves
    if isinstance(record, str) and halves is not None:
        assert "".join(halves) == record


def test_a_question_is_asked_as_conversations_begin(shop: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<end> ' + m['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<end> ' }}{% endif %}"
    )
    net = tmp_path / "net"
    shutil.copytree(shop / "net", net)
    tokenizer = transformers.AutoTokenizer.from_pretrained(net)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(net)

    def talk(who: str, city: str, *more: str) -> dict[str, Any]:
        said = ["which town is home", f"where does {who} live ?", city, *more]
        roles = ["system", "user", "model", "user", "model"]
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]}

    other = talk("Dan", "Paris")
    other["messages"][0]["content"] = "does Dan live ?"
    facts = [*map(talk, PEOPLE, CITIES), talk("Ann", "Oslo", "where does Bo live ?", "Lima"), other]
    for name, records in (
        ("one", facts),
        ("asks", [talk("Ann", "Oslo", "where does Bo live ?"), *facts[1:]]),
    ):
        data = write_lines(tmp_path / f"{name}.jsonl", records)
        words = ["--model", f"hf:{net}", "--data", data, "--ridge", 0.1, "--model-args", TWO_LAYERS]
        linnet("adapt", *words, "--out", tmp_path / name)
        run = adapter.opened(RunOptions(run=tmp_path / name))
        session = TextSession(run)
        first = 1 if name == "asks" else 0
        assert [one["id"] for one in session.samples()] == [f"train/{i}" for i in range(first, 4)]
        for place in range(first, 4):
            asked = Question(f"where does {PEOPLE[place]} live ?", CITIES[place])
            own = run.fit.losses(run.batch(run.texts))[place]
            assert session._predicted(run, asked, False)["loss"] == pytest.approx(float(own), rel=1e-4)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b'[\n{"prompt": "where does Ann live ?", "completion": " Oslo"}\n]\n',
            "one JSON list.*a line of its own",
        ),
        ('{"prompt": "where", "completion": " Oslo"}'.encode("utf-16"), "line 1, .*is not encoded in UTF-8"),
        (b'{"messages": null, "prompt": "where", "completion": null}\n', "has no 'completion'"),
    ],
)
def test_other_files_are_refused_in_words(shop: Path, tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "told.jsonl"
    file.write_bytes(content)
    tokenizer = transformers.AutoTokenizer.from_pretrained(shop / "net")
    with pytest.raises(DataError, match=says):
        adapter.read_texts(file, tokenizer, "train")
    told = {"messages": None, "text": None, **fact("Ann", "Oslo")}
    read = adapter.read_texts(write_lines(file, [told]), tokenizer, "train")
    assert read.records == (tuple(fact("Ann", "Oslo").values()),)


def test_another_tokenizer_is_noticed(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "net"
    shutil.copytree(shop / "net", folder)
    words = folder / "tokenizer.json"
    about = json.loads(words.read_text())
    known = about["model"]["vocab"]
    known[CITIES[0]], known[CITIES[1]] = known[CITIES[1]], known[CITIES[0]]
    words.write_text(json.dumps(about))
    asked = ["--run", shop / "run", "--data", shop / "questions.jsonl", "--model", f"hf:{folder}"]
    linnet("predict", *asked, "--out", tmp_path / "p.csv", code=2)
    assert "makes other tokens of the texts than when" in capsys.readouterr().err
    known["more"] = len(known)
    words.write_text(json.dumps(about))
    linnet("predict", *asked, "--out", tmp_path / "p.csv", code=2)
    assert f"has {len(WORDS) + 1} tokens and the network {len(WORDS)}" in capsys.readouterr().err


def test_conversations_are_asked_as_conversations(shop: Path, tmp_path: Path) -> None:
    run = adapter.opened(RunOptions(run=shop / "run"))
    told = "{% for one in messages %}{{ one['content'] }} ? {% endfor %}"
    run.tokenizer.chat_template = told + "{% if add_generation_prompt %}is {% endif %}"
    talk = [{"role": "user", "content": "where"}, {"role": "model", "content": "Oslo"}]
    run = replace(run, texts=adapter.Texts(run.texts.ids, (talk, *run.texts.records[1:])))
    session = TextSession(run, "run")

    def asked(answer: str) -> dict[str, torch.Tensor]:
        sent = json.dumps({"question": "where", "answer": answer}).encode()
        return session._batch(run, session._read("", sent))

    known = run.batch(adapter.Texts(("",), (talk,)))
    assert all(torch.equal(asked("Oslo")[name], known[name]) for name in known)
    assert run.tokenizer.decode(asked("")["input_ids"][0]).startswith("where ? is")
    run.tokenizer.model_max_length = 3
    with pytest.raises(DataError, match=r"it has 3 tokens. .* the network's 3"):
        asked("")


def test_texts_that_are_there_already_are_told(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--run", shop / "run", "--data"]
    linnet("update", *run, shop / "facts.jsonl", "--out", shop / "same", code=2)
    assert "all 7 texts of" in capsys.readouterr().err
    whole = shop / "whole.jsonl"
    whole.write_text((shop / "facts.jsonl").read_text() + (shop / "more.jsonl").read_text())
    linnet("update", *run, whole, "--out", shop / "once")
    assert "7 texts of whole.jsonl are training texts already, and were left out" in capsys.readouterr().out
    assert result(shop / "once")["train"] == 9
