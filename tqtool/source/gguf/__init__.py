"""GGUF files as a source: container, names, config and tokenizer, one module each."""
