"""Train within a number of bytes: trace a step, choose what it keeps, follow that plan."""
