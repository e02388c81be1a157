"""A call into linnet changes nothing that other code can see, whether it returns or fails half-way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hostile.global_state import differences, global_state, module_state
from tests.hostile.public_calls import CALLS, DRAWING, FORWARD, TRAINING, Scene
from tests.hostile.repeated_calls import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
FIRST_FAILURES = (1, 2, 4, 9)  # runs of the user's forward pass that raise an error, one after the other


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings of so few examples and steps are not what is tested here."""
    FORWARD["calls"], FORWARD["raises at"] = 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    FORWARD["raises at"] = 0


def observed(scene: Scene, call: Callable[[Scene], Any]) -> tuple[list[str], list[str]]:
    """What a call changes: of the process, and of the user's network."""
    model = scene.model
    before, mine = global_state(), module_state(model)
    try:
        call(scene)
    finally:
        changed = differences(before, global_state()), differences(mine, module_state(model))
    return changed


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.thinned(8)
def test_a_call_changes_nothing(name: str) -> None:
    assert observed(Scene(), CALLS[name]) == ([], [])


@pytest.mark.parametrize("name", DRAWING)
def test_only_the_random_stream_moves_where_numbers_are_drawn(name: str) -> None:
    assert observed(Scene(), DRAWING[name]) == (["torch's random stream"], [])


@pytest.mark.parametrize("name", TRAINING)
def test_training_changes_the_weights_alone(name: str) -> None:
    scene = Scene()
    changed, mine = observed(scene, TRAINING[name])
    assert changed in ([], ["torch's random stream"])  # dropout of the network itself
    assert all(entry.endswith(("_parameters", "_buffers")) for entry in mine)
    assert all(m.training for m in scene.model.modules())
    assert not scene.model.fixed.weight.requires_grad


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if k % 4 == 0 else (pytest.mark.long,))
        for k, name in enumerate([*CALLS, *DRAWING, *TRAINING])
    ],
)
@pytest.mark.thinned(3)
def test_an_error_in_the_forward_pass_leaves_everything_as_it_was(name: str) -> None:
    call = {**CALLS, **DRAWING, **TRAINING}[name]
    said: list[str] = []
    for at in FIRST_FAILURES:
        scene = Scene()
        before, mine = global_state(), module_state(scene.model)
        FORWARD["calls"], FORWARD["raises at"] = 0, at
        try:
            call(scene)
        except Exception as error:
            said.append(f"{error} {error.__cause__} {error.__context__}")
        FORWARD["raises at"] = 0
        changed, own = differences(before, global_state()), differences(mine, module_state(scene.model))
        allowed = ["torch's random stream"] if name in {*DRAWING, *TRAINING} else []
        assert set(changed) <= set(allowed), (at, changed)
        if name not in TRAINING:
            assert own == [], (at, own)
    assert all("the user's own mistake" in text for text in said)
    assert said or name in ("linearize", "leaky relu", "with_head zero", "with_head random")


def test_the_state_that_is_watched_can_change() -> None:
    """Each entry is seen to differ where it does: a test that cannot fail proves nothing."""
    before = global_state()
    torch.rand(1)
    os.environ["LINNET_TEST_OF_STATE"] = "1"
    torch.set_num_threads(torch.get_num_threads() + 1)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.inference_mode():
            found = differences(before, global_state())
    finally:
        handle.remove()
        del os.environ["LINNET_TEST_OF_STATE"]
        torch.set_num_threads(torch.get_num_threads() - 1)
    assert {"torch's random stream", "environment", "threads", "hooks of all modules"} <= set(found)
    assert {"hooks of saved tensors", "inference mode"} <= set(found)
    scene = Scene()
    mine = module_state(scene.model)
    scene.model.head.extra = 3
    scene.model.head.bias.grad = None
    scene.model.body.eval()
    scene.model.fixed.requires_grad_(True)
    found = differences(mine, module_state(scene.model))
    assert {"head.extra", "head._parameters", "body.training", "fixed._parameters"} <= set(found)


# --- what only a fresh process shows --------------------------------------------------------------

FIRST_CALL = """
import os, sys, warnings, torch
from tests.hostile.public_calls import CALLS, TRAINING, Scene
warnings.simplefilter("ignore")
assert "torch._dynamo" not in sys.modules
before = dict(os.environ)
{**CALLS, **TRAINING}[sys.argv[1]](Scene())
assert "torch._dynamo" in sys.modules, "torch has imported nothing that writes to the environment"
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""


def alone(*arguments: str) -> str:
    """Python in a process of its own, with one thread; its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", ["fit auto", *(pytest.param(n, marks=pytest.mark.long) for n in ("call", "GaussNewton"))]
)
def test_the_first_call_of_a_process_leaves_the_environment(name: str) -> None:
    """Torch imports its compiler then, which writes TORCHINDUCTOR_CACHE_DIR."""
    alone("-c", FIRST_CALL, name)


#: What may be there in the end, and for each call: counts and caches of Python's own, but no tensor.
ALLOWED = {
    "objects": (20, 0.1),
    "tensors": (0, 0.0),
    "bytes of objects": (100_000, 500.0),
    "bytes of the process": (2_000_000, 20_000.0),
}


def check_growth(name: str, calls: int) -> None:
    """Nothing is left of repeated calls."""
    found = json.loads(alone("-m", "tests.hostile.repeated_calls", name, str(calls)))
    assert found.keys() == ALLOWED.keys()
    for what, (once, each) in ALLOWED.items():
        assert found[what] <= once + each * calls, (name, found)


@pytest.mark.long
@pytest.mark.parametrize("name", ["curvature"])
def test_memory_does_not_grow(name: str) -> None:
    check_growth(name, 30)


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_does_not_grow_over_two_hundred_calls(name: str) -> None:
    check_growth(name, 200)
