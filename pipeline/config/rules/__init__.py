"""The rules between configuration keys: a file per group, each rule beside the key that it names. check.py runs them."""
