"""Prove that a network's steps within a budget are the baseline's, in less memory:

    python -m keepless.prove MODULE:FUNCTION --budget 6GiB
    python -m keepless.prove MODULE:FUNCTION --budget 0.5 --autocast bfloat16

FUNCTION takes no arguments, and returns a network and an example of its input, as for keepless.fit: a tensor, a tuple
of arguments, or a dictionary of keyword arguments. A float tensor of zeros stands for random numbers. The network is
trained on a CUDA device if there is one: twice without the budget, and within it, in a process each. The exit status
is 1 if anything is not as promised.
"""

from ..commands import parser_of, run_command
from ..recompute.signatures.plans import parsed_budget
from .prove import proof_in_processes


def main(arguments: list[str]) -> bool:
    """Print the proof; returns whether all is as promised. ValueError: an argument is wrong, or a step fails."""
    parser = parser_of("keepless.prove", __doc__)
    parser.add_argument("--budget", required=True, help="bytes, such as 6GiB, or a share of the baseline's peak: 0.5")
    options = parser.parse_args(arguments)
    parsed_budget(options.budget)  # raises before the network is made
    proof = proof_in_processes(options.function, options.budget, options.autocast)
    print(proof)
    return not proof.broken


if __name__ == "__main__":
    run_command(main, "keepless.prove")
