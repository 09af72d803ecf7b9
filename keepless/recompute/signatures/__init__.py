"""What a pass follows: the script, and within a budget the plan, for the signature of its inputs."""
