"""The commands, and what they are made of: digest logs, fingerprints, claims, the contract's cases."""
