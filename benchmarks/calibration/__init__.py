"""How well a profile predicts other steps."""
