"""Record a forward pass: what each call saves, what is kept, and what a recipe computes again."""
