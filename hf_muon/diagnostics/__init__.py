"""Log lines, the environment variables that ask for more of them, and measures of tensors; imports only torch."""
