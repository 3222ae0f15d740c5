"""Tokenizers, token shards, and conversion to and from the formats of other tools."""
