"""The local page of `linnet serve`: predictions of one run, the samples behind them, and forgetting."""
