"""What a test of a new operator, solver or curvature needs: dense oracles and conformance suites."""
