"""From the files of the user and of zsim to a resolved spec: every choice made, every number SI."""
