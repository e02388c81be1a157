"""Test tools for operators, solvers and curvatures: dense oracles and conformance suites."""
