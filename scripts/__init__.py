"""Set-up and demonstration scripts; nothing of the product itself."""
