"""The user's plan: rules on collectives, selected by name."""
