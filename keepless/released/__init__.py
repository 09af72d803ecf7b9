"""The interface and weights of the released package `inplace_abn`."""
