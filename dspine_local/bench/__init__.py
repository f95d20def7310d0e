"""Speed of plain decoding, of drafting and of other servers, measured side by side (docs/benchmarking.md)."""
