"""The part of `fedtmle` that a hospital trusts with its records; it imports nothing of the rest."""
