"""One part of a Gram matrix, as a task of an array job.

for i in 0 1 2 3; do python deploy/kernel.py --file kernel.npy --part $i/4; done
"""

from __future__ import annotations

import argparse

from fit import problem

import linnet


def main() -> None:
    """Compute the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", required=True, help="the .npy file of all parts")
    parser.add_argument("--part", required=True, help="which part, from 0, of how many: 3/64")
    arguments = parser.parse_args()
    index, of = (int(number) for number in arguments.part.split("/"))
    network, x, _ = problem()
    kernel = linnet.spectrum.gram_part(network, x, form="trace", file=arguments.file, part=(index, of))
    print(
        f"part {index} of {of} is done"
        if kernel is None
        else f"{arguments.file} is complete: {tuple(kernel.shape)}"
    )


if __name__ == "__main__":
    main()
