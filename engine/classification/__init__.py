"""Classification of whole images: its evaluation and scores."""
