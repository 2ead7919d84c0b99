"""Other people's classifiers, of which nothing is asked but answers."""
