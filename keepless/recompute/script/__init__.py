"""A recorded pass as a list of calls, which later passes follow."""
