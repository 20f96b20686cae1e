"""Planning: turn a manifest and a skeleton into windows of strided copies; no file is opened."""
