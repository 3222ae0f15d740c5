"""One module a form of file: read(span, options) gives its documents. pipeline.data.read.suffixes says which file has which form."""
