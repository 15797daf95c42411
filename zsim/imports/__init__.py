"""Files that users already have, read into the project's own types."""
