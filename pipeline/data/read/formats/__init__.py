"""One module per file format: read(span, options) yields its documents. pipeline.data.read.suffixes maps suffixes to formats."""
