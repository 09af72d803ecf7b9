"""The functions whose calls can be repeated, and how."""
