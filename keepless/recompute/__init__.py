"""Any network in less memory: cheap activations are computed again in the backward pass instead of kept."""
