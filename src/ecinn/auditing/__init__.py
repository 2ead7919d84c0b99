"""What a model looks at, measured over many images and shown on one page."""
