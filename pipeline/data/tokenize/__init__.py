"""Tokenizers, token shards, and the formats of others."""
