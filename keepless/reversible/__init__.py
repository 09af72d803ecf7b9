"""Modules that restore their inputs from their outputs instead of saving them."""
