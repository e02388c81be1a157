"""Folders as the Hugging Face Hub keeps them: tensors, one JSON file and a page that says what they are."""
