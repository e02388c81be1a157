"""Studies of LQF: linear quadratic fine-tuning (Achille, Golatkar, Ravichandran, Polito, Soatto 2021)."""
