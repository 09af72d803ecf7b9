"""Speed of the training crops: against decoding their files, and against resizing whole images; memory, start-up."""
