"""Which of the wrong values a kind of parameter may take after all, and which kind a parameter is of."""

from __future__ import annotations

REAL = {"half", "three", "scalar tensor", "integer tensor"}
WHOLE = {"integer tensor"}
PLACES = {"text", "missing file", "bytes"} - {"bytes"}
DTYPES = {"~integer", "~bool", "~float32", "~float64", "~requires grad", "~list"}

# Kind: names of wrong values that it may take; where it does, the numbers that follow must be finite.
KINDS: dict[str, frozenset[str]] = {
    name: frozenset(values)
    for name, values in {
        "flag": {"true", "false"},
        "count": WHOLE,
        "count or none": WHOLE | {"None"},
        "count from zero": WHOLE | {"zero"},
        "positive": REAL,
        "not negative": REAL | {"zero"},
        "real": REAL | {"zero", "minus one"},
        "share": {"half"},
        "word": set(),
        "criterion": REAL,
        "name": {"text", "text with NUL", "long text"},
        "seed": WHOLE | {"zero"},
        "generator": WHOLE | {"zero"},
        "memory": WHOLE | {"huge"},
        "file to write": PLACES,
        "file to read": set(),
        "progress": {"true", "false"},
        "model": {"module"},
        "likelihood": set(),
        "object": set(),
        "params": set(),
        "output": set(),
        "function": {"lambda", "module"},
        "inputs": DTYPES | {"~shorter", "~longer", "tensor"},
        "labels": DTYPES,
        "tensor": DTYPES,
        "pair": {f"{part}: {kind}" for part in "xy" for kind in DTYPES},
        "vector": {"~requires grad", "entry: ~requires grad"},
        "anything": set(),
    }.items()
}

# Kind of a parameter by its name, where its callable is not in OF_CALL.
OF_NAME: dict[str, str] = {
    name: kind
    for kind, names in {
        "flag": "add joint batch discrete squared flip momentum masked per_output shared adaptive stop canonical "
        "record_gap clamps inplace noise_ base shard training_mode",
        "count": "samples steps max_steps epochs every batch_size members draws iterations rounds n bins points "
        "size k period log_every evaluate_every save_every tau_period zeta_period rejections classes",
    }.items()
    for name in names.split()
}
