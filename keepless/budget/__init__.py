"""Train within a number of bytes: trace a step, choose the values that it keeps, follow that plan."""
