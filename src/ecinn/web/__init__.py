"""The page and the service behind it."""
