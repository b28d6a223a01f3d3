"""What `atoll doctor` looks at in a machine's network: small functions that read facts and judge them."""
