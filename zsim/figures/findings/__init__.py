"""The numbers behind a picture, and what they say: typed records without a library, one family of answers a file."""
